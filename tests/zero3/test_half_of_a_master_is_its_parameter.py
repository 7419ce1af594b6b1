"""A shard stored in bf16 is the upper half of its master: fewer bytes, and no bit lost.

The halves of a sub-group lie in another file than its states, or in host memory, so each way in
which one of the two comes and the other doesn't is tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap.zero3
from nvmeswap.errors import SwapError, SwapReadError, SwapTimeoutError
from nvmeswap.io.engine import Engine
from tests.oracle import Run, first_difference
from tests.zero3.cases import LEARNING_RATE, VOCABULARY, AwkwardModel, Case, shard_in_ram

HARMLESS = "read 1000000 errno 5"
NUMEL = 1 << 16  # of a layer, and of a sub-group: no padding
LAYERS = 4


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines that are opened, the last one last; each fails when it is told to."""
    made: list[Engine] = []

    def open_engine(**options: Any) -> Engine:
        made.append(Engine(fault_script=HARMLESS, **options))
        return made[-1]

    monkeypatch.setattr("nvmeswap.swap.space.Engine", open_engine)
    yield made
    for engine in made:
        engine.close()


def build() -> AwkwardModel:
    """Small shards, and some of 7550 elements, which are cut."""
    torch.manual_seed(0)
    return AwkwardModel(dim=50, layers=2)


def backward(model: nn.Module, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    loss = model(tokens).float().square().mean()
    loss.backward()
    return float(loss)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


@functools.cache
def run_in_ram(steps: int) -> Run:
    model = build()
    shard_in_ram(model, bf16=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    losses = []
    for step in range(steps):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, weights_of(model))


def patiently(call: Callable[[], object], engine: Engine) -> list[SwapError]:
    """Call until it succeeds; returns the errors. After a timeout the drive is well again."""
    errors: list[SwapError] = []
    for _ in range(20):
        try:
            call()
        except SwapError as error:
            errors.append(error)
            if isinstance(error, SwapTimeoutError):
                engine.inject(HARMLESS)
        else:
            return errors
    raise AssertionError(errors)


# --- bytes ------------------------------------------------------------------------------------


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))


@pytest.mark.parametrize(("max_in_cpu", "half_nbytes"), [(0, 2), (10**9, 0)])
@pytest.mark.parametrize("built_in", [torch.float32, torch.bfloat16])
def test_step_moves_a_rest_instead_of_a_master(
    one_rank: None, tmp_path: Path, max_in_cpu: int, half_nbytes: int, built_in: torch.dtype
) -> None:
    """12 bytes a parameter read and 14 written would be 4 and 2 of them the parameter again."""
    config = Case(bf16=True, buffer_count=1, max_in_cpu=max_in_cpu).config(tmp_path)
    config["zero_optimization"]["sub_group_size"] = NUMEL
    model, optimizer = nvmeswap.zero3.shard(layers().to(built_in), config)
    stats = optimizer.swap.stats()
    rest_nbytes = 0 if built_in is torch.bfloat16 else LAYERS * NUMEL * 17 // 8
    assert stats.optimizer.write_nbytes == rest_nbytes
    assert stats.store.write_nbytes == rest_nbytes + LAYERS * NUMEL * 2

    model(torch.ones(2, 256)).float().sum().backward()
    optimizer.step()
    for _ in range(2):  # the gradients stay; nothing but steps
        before = optimizer.swap.stats()
        optimizer.step()
        after = optimizer.swap.stats()
        read = LAYERS - 1  # one is left from the last step
        assert after.optimizer.read_nbytes - before.optimizer.read_nbytes == (
            read * NUMEL * 81 // 8
        )
        assert after.store.read_nbytes - before.store.read_nbytes == (
            read * NUMEL * (81 + 8 * half_nbytes) // 8
        )
        assert after.optimizer.write_nbytes - before.optimizer.write_nbytes == (
            LAYERS * NUMEL * 81 // 8
        )
        assert after.store.write_nbytes - before.store.write_nbytes == LAYERS * NUMEL * 97 // 8
    optimizer.close()


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("buffer_count", [1, 3])
def test_model_built_in_bf16_is_trained_as_by_fp32_masters(
    one_rank: None, tmp_path: Path, params: str, device: str, buffer_count: int
) -> None:
    """Updates smaller than a bf16 step must add up, wherever the shard is."""
    case = Case(bf16=True, params=params, optimizer=device, buffer_count=buffer_count)
    resident = build().bfloat16()
    shard_in_ram(resident, bf16=True)
    trained = [parameter for parameter in resident.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(each.detach().to_local().float().clone()) for each in trained]
    reference = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    model, optimizer = nvmeswap.zero3.shard(build().bfloat16(), case.config(tmp_path))
    for step in range(4):
        assert backward(model, step) == backward(resident, step)
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters, trained, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.to_local().float()
        reference.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=True):
                parameter.to_local().copy_(master)
        resident.zero_grad()
        for module in (resident, *resident.blocks):
            module.reshard()
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, master in zip(ours, masters, strict=True):
        assert torch.equal(optimizer.read_state(parameter), master)
    difference = first_difference(Run([], weights_of(model)), Run([], weights_of(resident)))
    assert difference is None
    optimizer.close()


@pytest.mark.parametrize("way", ["state_dict", "save"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_state_goes_out_and_in_with_every_bit(
    one_rank: None, tmp_path: Path, way: str, params: str
) -> None:
    """A master that lost its rest, or met another's half, is another model."""
    case = Case(bf16=True, params=params, buffer_count=1)
    model, optimizer = nvmeswap.zero3.shard(build(), case.config(tmp_path))
    losses = []
    for step in range(4):
        if step == 2:
            saved = optimizer.state_dict()
            optimizer.save(tmp_path / "state")
            optimizer.close()
            torch.manual_seed(1)
            other = AwkwardModel(dim=50, layers=2)
            with torch.no_grad():
                other.shift.copy_(build().shift)
            model, optimizer = nvmeswap.zero3.shard(other, case.config(tmp_path))
            if way == "save":
                optimizer.load(tmp_path / "state")
            else:
                optimizer.load_state_dict(saved)
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    assert first_difference(Run(losses, weights_of(model)), run_in_ram(4)) is None
    optimizer.close()


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffer_count", "max_in_cpu"), [(1, 0), (3, 0), (1, 7000)])
@pytest.mark.parametrize("fault", ["read {} errno 5", "read {} flip", "write {} errno 28"])
def test_step_in_which_any_one_transfer_failed_is_exact_when_taken_again(
    one_rank: None,
    tmp_path: Path,
    engines: list[Engine],
    fault: str,
    buffer_count: int,
    max_in_cpu: int,
) -> None:
    """A rest beside the half of another step is a wrong master that nobody would notice."""
    case = Case(bf16=True, buffer_count=buffer_count, max_in_cpu=max_in_cpu)
    model, optimizer = nvmeswap.zero3.shard(build(), case.config(tmp_path))
    engine = engines[-1]
    losses, files = [], set()
    failed = True
    while failed or len(losses) < 9:  # the fault may meet what was read ahead and is not used
        losses.append(backward(model, len(losses)))
        if len(losses) > 2:  # the first step has no states to read
            engine.inject(fault.format(len(losses) - 2))
        failures = patiently(optimizer.step, engine)
        engine.inject(HARMLESS)
        failed = bool(failures)
        files |= {error.path.name for error in failures if error.path is not None}
        optimizer.zero_grad()
    assert files == {"params.swp", "optimizer.swp"}
    assert len(losses) > 8  # some transfers a step, each of which failed once
    ours = Run(losses, weights_of(model))
    assert first_difference(ours, run_in_ram(len(losses))) is None
    optimizer.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_step_whose_reads_are_not_answered_in_time_keeps_their_slots(
    one_rank: None, tmp_path: Path, engines: list[Engine], number: int
) -> None:
    """A late half that lands in a slot of others would overwrite their masters."""
    case = Case(bf16=True, buffer_count=1, extra={
        "nvmeswap": {"min_swap_nbytes": 1000, "timeout_s": 0.3}
    })
    model, optimizer = nvmeswap.zero3.shard(build(), case.config(tmp_path))
    engine = engines[-1]
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        if step in (1, 2):
            engine.inject(f"read {number} never; read {number + 1} errno 5")
        failures = patiently(optimizer.step, engine)
        assert step not in (1, 2) or any(isinstance(e, SwapTimeoutError) for e in failures)
        engine.inject(HARMLESS)
        optimizer.zero_grad()
    assert first_difference(Run(losses, weights_of(model)), run_in_ram(4)) is None
    optimizer.close()


class Breaks(torch.optim.AdamW):
    """Raises in the middle of a sub-group, once, when told to."""

    in_pieces = -1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        Breaks.in_pieces -= 1
        if Breaks.in_pieces == 0:
            raise RuntimeError("in the middle")
        return result


@pytest.mark.parametrize("params", ["cpu", "nvme"])
@pytest.mark.parametrize("buffer_count", [1, 3])
def test_update_that_broke_in_the_middle_is_undone_with_its_half(
    one_rank: None, tmp_path: Path, params: str, buffer_count: int
) -> None:
    """Else the update counts twice, or the old rest meets the new half."""
    case = Case(bf16=True, params=params, buffer_count=buffer_count)
    model, optimizer = nvmeswap.zero3.shard(
        build(), case.config(tmp_path), None, (Breaks, {"lr": LEARNING_RATE})
    )
    losses = []
    for step in range(6):
        losses.append(backward(model, step))
        Breaks.in_pieces = 2 * step + 1
        with pytest.raises(RuntimeError, match="in the middle"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert first_difference(Run(losses, weights_of(model)), run_in_ram(6)) is None
    optimizer.close()


@pytest.mark.parametrize("fault", ["write {} errno 5", "read {} errno 5"])
def test_parameter_that_could_not_be_replaced_is_replaced_the_next_time(
    one_rank: None, tmp_path: Path, engines: list[Engine], fault: str
) -> None:
    """`copy_` writes a half here and a rest there; only both are the value."""
    case = Case(bf16=True, buffer_count=1)
    model, optimizer = nvmeswap.zero3.shard(build(), case.config(tmp_path))
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    local = model.blocks[1].up.weight._local_tensor
    failure_count = 0
    for number in range(1, 6):
        values = torch.randn(local.shape, generator=torch.Generator().manual_seed(number))
        others = weights_of(model)
        engines[-1].inject(fault.format(number))
        with torch.no_grad():
            failure_count += len(patiently(lambda v=values: local.copy_(v), engines[-1]))
        engines[-1].inject(HARMLESS)
        others["blocks.1.up.weight"] = values
        assert first_difference(Run([], weights_of(model)), Run([], others)) is None
    assert failure_count
    optimizer.close()


def test_half_that_was_damaged_on_the_drive_is_no_master(
    one_rank: None, tmp_path: Path
) -> None:
    """The state's own checksum says nothing about it."""
    case = Case(bf16=True, buffer_count=1)
    model, optimizer = nvmeswap.zero3.shard(build(), case.config(tmp_path))
    for step in range(2):
        backward(model, step)
        if step == 1:
            (path,) = tmp_path.rglob("params.swp")
            path.write_bytes(b"\xa5" * path.stat().st_size)
            with pytest.raises(SwapReadError):
                optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
