"""Updates on a GPU, as far as no GPU is needed: the same code on the CPU, in a mirror of each slot,
gives the bits of pieces in the cache and of torch in RAM."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.config import SwapBlock
from nvmeswap.errors import SwapConfigError, SwapError, SwapUsageError
from nvmeswap.swap.device_master import join_on_device, split_on_device
from nvmeswap.swap.master import MasterRest
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.swap.update_place import UpdatePlace
from tests.swap.conftest import Bench, Make, set_gradients
from tests.swap.test_any_optimizer_equals_ram import assert_run_equals_plain, runs
from tests.swap.test_master_split_is_lossless import bits_of, masters
from tests.swap.twins import ADAMW, BF16, FP32, RECIPES, Recipe, Twins, parameters_of

MIRROR = UpdatePlace(torch.device("cpu"), is_mirrored=True)
FP16 = torch.float16
SIZES = [37, 5000, 30_000]


# --- the bytes ------------------------------------------------------------------------------------


@given(masters())
def test_split_and_join_have_the_bytes_of_the_loops_in_c(master: torch.Tensor) -> None:
    """Else a checkpoint or a slot of one is another state to the other."""
    numel = master.numel()
    memories = [torch.full((MasterRest.nbytes_for(numel),), 0xA5, dtype=torch.uint8)] * 2
    expected, memory = (each.clone() for each in memories)
    halves, parameter = (torch.empty(numel, dtype=BF16) for _ in range(2))
    MasterRest(expected, numel).split(0, master, halves)
    split_on_device(master, parameter, memory)
    assert torch.equal(memory, expected)
    assert torch.equal(bits_of(parameter), bits_of(halves))
    assert_joined_as_in_c(parameter, memory)


@given(st.integers(1, 3000), st.integers(0, 1 << 32), st.sampled_from([0x0000, 0x8000, 0x7FC0]))
def test_any_parameter_with_any_rest_joins_as_in_c(numel: int, seed: int, often: int) -> None:
    """Somebody may have written the parameter: zeros, with a carry beside them, are zeros."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 1 << 16, numel).astype(np.uint16)
    bits[::3] = often
    memory = generator.integers(0, 256, MasterRest.nbytes_for(numel)).astype(np.uint8)
    parameter = torch.from_numpy(bits.view(np.int16)).view(BF16)
    assert_joined_as_in_c(parameter, torch.from_numpy(memory))


def assert_joined_as_in_c(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    numel = parameter.numel()
    expected, joined = (torch.full((numel,), torch.nan) for _ in range(2))
    MasterRest(memory, numel).join(0, parameter, expected)
    join_on_device(parameter, memory, joined)
    assert torch.equal(bits_of(joined), bits_of(expected))


def test_masters_of_many_pieces_come_back() -> None:
    """Temporary memory is bounded; a byte of carries must not be cut in two."""
    numel = 2 * (1 << 22) + 13
    master = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    expected, memory = (
        torch.full((MasterRest.nbytes_for(numel),), 0xA5, dtype=torch.uint8) for _ in range(2)
    )
    parameter, joined = torch.empty(numel, dtype=BF16), torch.empty(numel)
    MasterRest(expected, numel).split(0, master, torch.empty(numel, dtype=BF16))
    split_on_device(master, parameter, memory)
    join_on_device(parameter, memory, joined)
    assert torch.equal(memory, expected) and torch.equal(joined, master)


# --- the values -----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_run_equals_the_plain_optimizer(
    tmp_path_factory: pytest.TempPathFactory, run: dict[str, Any]
) -> None:
    """All optimizers, dtypes, sizes, accumulations, schedules, groups that are added."""
    assert_run_equals_plain(run, tmp_path_factory.mktemp("run"), update_device=MIRROR)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_state_goes_from_one_place_to_the_other_and_back(make: Make, recipe: Recipe) -> None:
    """A run is begun where there is a GPU and goes on where there is none."""
    shapes, dtypes = [(37,), (), (30, 300), (5000,)], [BF16, FP32, FP16, FP32]

    def optimizer_over(groups: Any, place: Any = "cpu") -> SwappedOptimizer:
        return make(
            groups, recipe.kind, sub_group_size=4096, update_device=place, **recipe.options
        )

    twins = Twins(recipe, parameters_of(shapes, dtypes), optimizer_over)
    for turn, next_place in enumerate((MIRROR, "cpu", MIRROR)):
        for step in (2 * turn, 2 * turn + 1):
            twins.backward(step)
            twins.step()
            twins.swapped.zero_grad()
        twins.assert_same()
        saved = copy.deepcopy(twins.swapped.state_dict())
        twins.swapped = optimizer_over(recipe.groups(twins.params), next_place)
        twins.swapped.load_state_dict(saved)
    twins.assert_same()


def test_state_file_goes_from_one_place_to_the_other(make: Make, tmp_path: Path) -> None:
    dtypes = [FP32, BF16, FP16]
    finals = []
    for places in (("cpu", "cpu"), ("cpu", MIRROR), (MIRROR, "cpu"), (MIRROR, MIRROR)):
        params = parameters_of([(37,), (9000,), (5000,)], dtypes)
        for number, place in enumerate(places):
            optimizer = make(params, sub_group_size=4096, update_device=place)
            if number:
                optimizer.load(tmp_path / "state")
            for step in (2 * number, 2 * number + 1):
                set_gradients(params, step)
                optimizer.step()
            optimizer.save(tmp_path / "state")
        finals.append([*params, *(optimizer.read_state(p) for p in params)])
    for final in finals[1:]:
        assert all(map(torch.equal, final, finals[0]))


def test_exact_values_of_a_state_are_those_of_a_parameter_that_is_its_own_master(
    make: Make,
) -> None:
    """A state made where it was not has them; the parameter may be anything yet."""
    params, others = parameters_of([(5000,)], [FP16]), parameters_of([(5000,)], [FP32], seed=1)
    optimizer, other = make(params), make(others, update_device=MIRROR)
    set_gradients(params, 0)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(others[0], optimizer.read_state(params[0]))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_values_that_others_write_count(make: Make, dtype: torch.dtype) -> None:
    """By copy_, by write_state, and before the first step."""
    finals = []
    for place in ("cpu", MIRROR):
        params = parameters_of([(37,), (9000,)], [dtype, dtype])
        optimizer = make(params, sub_group_size=4096, update_device=place)
        with torch.no_grad():
            params[0].fill_(-0.0)
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    params[1][::2].copy_(params[1][::2].abs() + 8)
                optimizer.write_state(params[0], torch.linspace(-2, 2, 37))
                optimizer.write_state(params[0], torch.full((37,), 0.5), "exp_avg")
            set_gradients(params, step)
            if step == 1:
                params[1].grad = None
            optimizer.step()
        finals.append([*params, *(optimizer.read_state(p) for p in params)])
    assert all(map(torch.equal, *finals))


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_updates_during_backward_equal_those_after_it(
    make: Make, clip_norm: float | None
) -> None:
    """Gradients that are clipped come with a scale."""
    finals = []
    for place in ("cpu", MIRROR):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(96, 300), torch.nn.Tanh(), torch.nn.Linear(300, 96, dtype=FP32)
        ).to(BF16)
        optimizer = make(
            model.parameters(), sub_group_size=4096, update_device=place,
            overlap=OverlapSettings(2, clip_norm),
        )
        for step in range(8):
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(BF16)
            model(x).square().mean().backward()
            if step % 2:
                optimizer.step()
                assert all(parameter.grad is None for parameter in model.parameters())
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *finals))


def test_states_in_bfloat16_are_those_of_pieces(make: Make) -> None:
    finals = []
    for place in ("cpu", MIRROR):
        params = parameters_of([(9000,)], [FP32])
        optimizer = make(params, sub_group_size=4096, update_device=place, state_dtype=BF16)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
        finals.append([*params, optimizer.read_state(params[0], "exp_avg_sq")])
    assert all(map(torch.equal, *finals))


# --- what goes wrong ------------------------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """Raises after the update of some segment, when told to."""

    in_segments = -1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        Breaks.in_segments -= 1
        if Breaks.in_segments == 0:
            raise RuntimeError("in the middle")
        return result


@pytest.mark.parametrize("ratio", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_update_that_broke_has_changed_nothing(
    make: Make, dtype: torch.dtype, ratio: float
) -> None:
    """Also of a parameter that is updated in its own memory, and of states that are not on NVMe."""
    finals = []
    for breaks in (False, True):
        params = parameters_of([(size,) for size in SIZES], [dtype] * 3)
        optimizer = make(
            params, Breaks, lr=0.1, momentum=0.9, sub_group_size=8192, ratio=ratio,
            update_device=MIRROR,
        )
        for step in range(3):
            set_gradients(params, step)
            if breaks:
                before = params[0].detach().clone()
                Breaks.in_segments = 2  # the second of the first sub-group, each other time
                with pytest.raises(RuntimeError, match="in the middle"):
                    optimizer.step()
                assert optimizer.step_is_unfinished
                if step != 1:
                    assert torch.equal(params[0], before)
            Breaks.in_segments = -1
            optimizer.step()
        finals.append([*params, *(optimizer.read_state(p, "momentum_buffer") for p in params)])
    assert all(map(torch.equal, *finals))


def test_step_after_a_fault_can_be_taken_again(bench: Bench) -> None:
    """A read or a write fails; what was updated in place is not updated twice."""
    twins = Twins(
        ADAMW,
        parameters_of([(size,) for size in SIZES], [FP32, BF16, FP16]),
        lambda groups: bench.optimizer(ADAMW.kind, groups, update_device=MIRROR, **ADAMW.options),
    )
    for step, script in enumerate(("read 2 errno 5", "write 2 errno 28", "read 3 flip") * 2):
        twins.backward(step)
        twins.step_plain()
        bench.engine.inject(script)
        for _ in range(3):
            try:
                twins.swapped.step()
                break
            except SwapError:
                bench.engine.inject("read 1000000 errno 5")
        twins.swapped.zero_grad()
        twins.assert_same_parameters()
    twins.assert_same()


def test_steps_stopped_by_ctrl_c_go_on(make: Make) -> None:
    twins = Twins(
        ADAMW,
        parameters_of([(37,), (50_000,), (30_000,)], [FP32, BF16, FP16]),
        lambda groups: make(
            groups, sub_group_size=4096, buffer_count=2, update_device=MIRROR, **ADAMW.options
        ),
    )
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    stopped_count = 0
    try:
        for step in range(12):
            twins.backward(step)
            twins.step_plain()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (step + 1))
                twins.swapped.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped_count += 1
                count = int(twins.swapped.state[twins.params[0]].get("step", 0))
                if twins.swapped.step_is_unfinished or count != step + 1:
                    twins.swapped.step()
            twins.swapped.zero_grad()
            twins.assert_same_parameters()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    twins.assert_same()
    assert stopped_count


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_that_is_not_there_is_said_with_a_fix(make: Make) -> None:
    params = parameters_of([(37,)], [FP32])
    for options in ({"update_device": "cuda"}, {"swap": SwapBlock(update_device="cuda")}):
        with pytest.raises(SwapUsageError, match="cuda") as raised:
            make(params, **options)
        assert raised.value.fix and raised.value.cause


@pytest.mark.parametrize("told", ["tpu", "cuda:x", "meta", torch.device("meta"), ""])
def test_other_places_are_refused_by_name(make: Make, told: Any) -> None:
    with pytest.raises(SwapConfigError) as raised:
        make(parameters_of([(37,)], [FP32]), update_device=told)
    assert raised.value.key == "update_device"


def test_argument_goes_before_the_block(make: Make) -> None:
    params = parameters_of([(37,)], [FP32])
    make(params, update_device="cpu", swap=SwapBlock(update_device="cuda"))
