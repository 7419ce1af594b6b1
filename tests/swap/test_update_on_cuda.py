"""Updates on a GPU: the bits of torch's optimizer there, and in the order of the streams."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvmeswap.config import SwapBlock
from nvmeswap.swap.device_master import join_on_device, split_on_device
from nvmeswap.swap.master import MasterRest
from nvmeswap.swap.overlap import OverlapSettings
from tests.swap.conftest import Make
from tests.swap.test_update_in_a_mirror import Breaks
from tests.swap.twins import ADAMW, BF16, FP32, RECIPES, Recipe, Shape, Twins, parameters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP16 = torch.float16
SHAPES: list[Shape] = [(37,), (), (70_000,), (3, 30_000), (4097,), (0,)]
MIXED = [BF16, FP32, FP32, BF16, FP16, FP32]
SLEEP_CYCLES = 100_000_000  # some 50 ms


@pytest.fixture
def make(make: Make) -> Make:
    """Optimizers that update on the GPU."""
    return partial(make, update_device="cuda", sub_group_size=20_000, pin_memory=True)


def on_gpu(shapes: list[Shape], dtypes: list[torch.dtype], seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(each.detach().cuda()) for each in parameters_of(shapes, dtypes, seed)]


def twins_of(make: Make, recipe: Recipe = ADAMW, **options: Any) -> Twins:
    return Twins(
        recipe,
        on_gpu(SHAPES, MIXED),
        lambda groups: make(groups, recipe.kind, **recipe.options, **options),
        "cuda",
    )


def run(twins: Twins, steps: range, accumulation: int = 1) -> None:
    for step in steps:
        for micro_batch in range(accumulation):
            twins.backward(10 * step + micro_batch)
        twins.step()
        twins.swapped.zero_grad()


# --- the bits -------------------------------------------------------------------------------------


def test_split_and_join_have_the_bytes_of_the_loops_in_c() -> None:
    """NaN, infinity, ties, zeros that somebody wrote: any bits."""
    generator = torch.Generator().manual_seed(0)
    numel = (1 << 22) + 13
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32)
    bits[::3] = bits[::3] & -0x10000 | 0x8000
    bits[::7] |= 0x7F800000
    bits[::11] &= -0x7FFF0001
    master = bits.view(FP32)
    expected, memory = (torch.zeros(MasterRest.nbytes_for(numel), dtype=torch.uint8),) * 2
    expected, memory = expected.clone(), memory.cuda()
    halves, parameter = torch.empty(numel, dtype=BF16), torch.empty(numel, dtype=BF16).cuda()
    MasterRest(expected, numel).split(0, master, halves)
    split_on_device(master.cuda(), parameter, memory)
    assert torch.equal(memory.cpu(), expected)
    assert torch.equal(parameter.cpu().view(torch.int16), halves.view(torch.int16))
    halves[::5] = 0.0
    joined, there = torch.empty(numel), torch.empty(numel).cuda()
    MasterRest(expected, numel).join(0, halves, joined)
    join_on_device(halves.cuda(), memory, there)
    assert torch.equal(there.cpu().view(torch.int32), joined.view(torch.int32))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_run_equals_torch_on_the_gpu(make: Make, recipe: Recipe, accumulation: int) -> None:
    """Else a model trained with state on NVMe is another model.  field cases D01, O02"""
    twins = twins_of(make, recipe)
    run(twins, range(5), accumulation)
    twins.assert_same()


@pytest.mark.parametrize("options", [
    {"sub_group_size": 4096, "buffer_count": 1}, {"sub_group_size": 1 << 20}, {"ratio": 0.0},
    {"ratio": 0.5, "pin_memory": False}, {"swap": SwapBlock(host_memory_nbytes=8 << 20)},
], ids=str)
def test_values_depend_on_no_setting(make: Make, options: dict[str, Any]) -> None:
    twins = twins_of(make, **options)
    run(twins, range(4))
    twins.assert_same()


def test_block_says_where_as_the_argument_does(make: Make) -> None:
    twins = twins_of(make, update_device=None, swap=SwapBlock(update_device="cuda"))
    run(twins, range(3))
    twins.assert_same()


def test_rate_that_is_a_tensor_and_unfused_equal_torch(make: Make) -> None:
    choices: list[dict[str, Any]] = [
        {"lr": torch.tensor(0.01)}, {"fused": False}, {"foreach": False},
    ]
    for options in choices:
        recipe = Recipe(torch.optim.AdamW, options, {"weight_decay": 0.1})
        ours, theirs = on_gpu(SHAPES, [FP32] * 6), on_gpu(SHAPES, [FP32] * 6)
        swapped = make(recipe.groups(ours), **recipe.options)
        plain = recipe.plain(recipe.groups(theirs), fused="lr" in options)
        for step in range(3):
            for mine, other in zip(ours, theirs, strict=True):
                mine.grad, other.grad = mine.detach() * (step + 1), other.detach() * (step + 1)
            swapped.step()
            plain.step()
        assert all(map(torch.equal, ours, theirs)), options


def test_parameters_on_the_host_get_the_bits_of_the_gpu(make: Make) -> None:
    """Offloaded modules' are there; they are updated on the GPU all the same."""
    twins = Twins(
        ADAMW, parameters_of(SHAPES, MIXED), lambda groups: make(groups, **ADAMW.options), "cuda"
    )
    run(twins, range(4))
    twins.assert_same()


def test_run_that_clips_equals_torch(make: Make) -> None:
    """field case O01"""
    twins = twins_of(make)
    for step in range(4):
        twins.backward(step)
        twins.swapped.clip_grad_norm_(0.1)
        twins.step()
        twins.swapped.zero_grad()
    twins.assert_same()


def test_each_element_moves_no_byte_too_many(make: Make) -> None:
    """A parameter on the GPU is its own master there, or half of it.  field case O03"""
    for dtype, eighths in ((FP32, 8 * 8), (BF16, 8 * 10 + 1)):
        numel = 4 * 65_536
        params = on_gpu([(numel,)], [dtype])
        optimizer = make(params, sub_group_size=65_536, buffer_count=1)
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert optimizer.stats().write_nbytes == numel * eighths // 8


# --- saved, loaded, edited ------------------------------------------------------------------------


def test_run_goes_on_from_a_file(make: Make, tmp_path: Path) -> None:
    """field case F01"""
    twins = twins_of(make)
    run(twins, range(3))
    twins.swapped.save(tmp_path / "state")
    twins.swapped = make(ADAMW.groups(twins.params), **ADAMW.options)
    twins.swapped.load(tmp_path / "state")
    run(twins, range(3, 6))
    twins.assert_same()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_state_goes_through_the_cpu_and_back(make: Make, recipe: Recipe) -> None:
    """Values are the same, though the layout is another."""
    twins = twins_of(make, recipe)
    run(twins, range(2))
    for place in ("cpu", "cuda"):
        saved = copy.deepcopy(twins.swapped.state_dict())
        twins.swapped = make(
            recipe.groups(twins.params), recipe.kind, update_device=place, **recipe.options
        )
        twins.swapped.load_state_dict(saved)
        for parameter, master in zip(twins.params, twins.masters, strict=True):
            assert torch.equal(twins.swapped.read_state(parameter), master.cpu())
    run(twins, range(2, 4))
    twins.assert_same()


def test_state_goes_to_the_plain_optimizer_and_back(make: Make) -> None:
    """Its step counts are on the GPU.  field case F05"""
    ours, theirs = on_gpu(SHAPES, [FP32] * 6), on_gpu(SHAPES, [FP32] * 6)
    swapped, plain = make(ours), torch.optim.AdamW(theirs, fused=True)
    for step in range(6):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad, other.grad = mine.detach() * (step + 1), other.detach() * (step + 1)
        if step == 2:
            swapped.load_state_dict(copy.deepcopy(plain.state_dict()))
        if step == 4:
            plain.load_state_dict(copy.deepcopy(swapped.state_dict()))
        swapped.step()
        plain.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_values_that_others_write_count(make: Make, dtype: torch.dtype) -> None:
    params = on_gpu([(37,), (9000,)], [dtype, dtype])
    twins = Twins(ADAMW, params, lambda groups: make(groups, **ADAMW.options), "cuda")
    run(twins, range(2))
    with torch.no_grad():
        params[1].copy_(params[1].abs() + 8)
        twins.masters[1].copy_(params[1])
    assert torch.equal(twins.swapped.read_state(params[1]), twins.masters[1].cpu())
    exact = twins.masters[0].detach() + 1
    twins.swapped.write_state(params[0], exact)
    with torch.no_grad():
        twins.masters[0].copy_(exact)
    run(twins, range(2, 5))
    twins.assert_same()


# --- the streams ----------------------------------------------------------------------------------


# field case O05
@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("buffer_count", [1, 3])
def test_step_waits_for_gradients_and_what_follows_for_the_step(
    make: Make, on_side_stream: bool, buffer_count: int
) -> None:
    """The GPU is behind: gradients are still NaN when step() is called, and are NaN again at
    once."""
    twins = twins_of(make, buffer_count=buffer_count)
    gradients = [torch.full_like(parameter, torch.nan) for parameter in twins.params]
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    for step in range(4):
        twins.backward(step)
        twins.step_plain()
        true = [parameter.grad.clone() for parameter in twins.params if parameter.grad is not None]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for parameter, gradient in zip(twins.params, gradients, strict=True):
                parameter.grad = gradient.fill_(torch.nan)
            torch.cuda._sleep(SLEEP_CYCLES)
            for gradient, values in zip(gradients, true, strict=True):
                gradient.copy_(values)
            twins.swapped.step()
            seen = [parameter.detach() * 1 for parameter in twins.params]
            for gradient in gradients:
                gradient.fill_(torch.nan)
        torch.cuda.synchronize()
        for value, master in zip(seen, twins.masters, strict=True):
            assert torch.equal(value, master.to(value.dtype)), step
        twins.swapped.zero_grad()
    twins.assert_same()


def test_step_waits_for_its_own_copies_only(make: Make) -> None:
    """It must not stop the device: what others have queued there is none of its business."""
    params = on_gpu([(70_000,), (90_000,)], [FP32, BF16])
    optimizer = make(params)
    for step in range(3):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(20 * SLEEP_CYCLES)
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not other.query()
        torch.cuda.synchronize()


class Late(torch.autograd.Function):
    """Backward that takes the GPU a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.low = nn.Linear(96, 96, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Late.apply(layer(x).tanh())  # type: ignore[no-untyped-call]
        made: Tensor = self.low(x.to(BF16)).float()
        return made


# field case O05
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_updates_behind_a_slow_backward_equal_those_after_it(
    make: Make, accumulation: int, clip_norm: float | None
) -> None:
    """A gradient is told of when it is queued, and its memory is another's soon after."""
    finals = []
    for overlap in (None, OverlapSettings(accumulation, clip_norm)):
        model = Model().cuda()
        optimizer = make(model.parameters(), sub_group_size=4096, overlap=overlap)
        for step in range(4):
            for micro_batch in range(accumulation):
                generator = torch.Generator().manual_seed(10 * step + micro_batch)
                x = torch.randn(4, 96, generator=generator).cuda()
                model(x).square().mean().backward()
            if overlap is None and clip_norm is not None:
                for parameter in model.parameters():
                    nn.utils.clip_grad_norm_([parameter], clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *finals))


# --- memory and errors ----------------------------------------------------------------------------


COUNTS_NBYTES = 1 << 16  # step counts, which are tensors


def test_memory_on_the_gpu_is_taken_once(make: Make) -> None:
    """A mirror of one slot and masters of one sub-group; beside it no more than a few pieces."""
    numel, sub_group_numel = 1 << 24, 1 << 20
    params = on_gpu([(numel,)], [BF16])
    before_nbytes = torch.cuda.memory_allocated()
    optimizer = make(params, sub_group_size=sub_group_numel)
    held_nbytes = torch.cuda.memory_allocated() - before_nbytes
    assert held_nbytes <= 16 * sub_group_numel
    params[0].grad = torch.ones_like(params[0])
    torch.cuda.reset_peak_memory_stats()
    before_nbytes = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
        assert torch.cuda.memory_allocated() <= before_nbytes + COUNTS_NBYTES
    assert torch.cuda.max_memory_allocated() <= before_nbytes + 40 * sub_group_numel
    optimizer.close()
    assert torch.cuda.memory_allocated() <= before_nbytes - held_nbytes + COUNTS_NBYTES


@pytest.mark.parametrize("ratio", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_update_that_broke_has_changed_nothing(
    make: Make, dtype: torch.dtype, ratio: float
) -> None:
    """Also of a parameter that is updated in its own memory, and of states that are not on NVMe."""
    finals = []
    for breaks in (False, True):
        params = on_gpu([(37,), (5000,), (30_000,)], [dtype] * 3)
        optimizer = make(
            params, Breaks, lr=0.1, momentum=0.9, sub_group_size=8192, ratio=ratio
        )
        for step in range(3):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            if breaks:
                Breaks.in_segments = 2
                with pytest.raises(RuntimeError, match="in the middle"):
                    optimizer.step()
            Breaks.in_segments = -1
            optimizer.step()
        finals.append([*params, *(optimizer.read_state(p, "momentum_buffer") for p in params)])
    assert all(map(torch.equal, *finals))


def test_import_leaves_cuda_alone() -> None:
    """A script forks its data loaders before the first use of the GPU."""
    code = "import torch, nvmeswap, nvmeswap.zero3; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
