"""A failed transfer stops the step with a typed error; the step can be taken again and is exact."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
    SwapUsageError,
)
from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.conftest import Bench, set_gradients

SIZES = [37, 5000, 30_000]
MakeParameters = Callable[..., list[torch.nn.Parameter]]


def masters_of(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().float()) for p in params]


def reference(params: list[torch.nn.Parameter], steps: int) -> list[torch.Tensor]:
    """The bf16 values after some steps in RAM."""
    masters = masters_of(params)
    resident = torch.optim.AdamW(masters, fused=True)
    for step in range(steps):
        set_gradients(params, step)
        for master, parameter in zip(masters, params, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        resident.step()
    return [master.detach().bfloat16() for master in masters]


@pytest.mark.parametrize(
    ("script", "error", "number"),
    [
        ("read 2 errno 5", SwapReadError, errno.EIO),
        ("read 3 short 0", SwapReadError, None),
        ("write 2 errno 28", SwapSpaceError, errno.ENOSPC),
        ("read 4 flip", SwapChecksumError, None),
    ],
)
def test_step_after_a_fault_can_be_taken_again_and_is_exact(
    bench: Bench,
    parameters: MakeParameters,
    script: str,
    error: type[SwapError],
    number: int | None,
) -> None:
    """Else one bad transfer ends a run of weeks, or its step is half taken.
    field cases K01, H08, D01"""
    ours = parameters(SIZES, dtype=torch.bfloat16)
    expected = reference(parameters(SIZES, dtype=torch.bfloat16), 4)
    swapped = bench.adamw(ours, sub_group_size=4096, buffer_count=2)
    failures: list[SwapError] = []
    for step in range(4):
        set_gradients(ours, step)
        if step == 1:
            bench.engine.inject(script)
        for _ in range(4):
            try:
                swapped.step()
                break
            except SwapError as failure:
                failures.append(failure)
    try:
        swapped.flush()
    except SwapError as failure:
        failures.append(failure)
        swapped.flush()
    assert failures and isinstance(failures[0], error)
    assert number is None or failures[0].errno == number
    assert failures[0].path is not None and failures[0].path.name == "optimizer.swp"
    assert all(map(torch.equal, ours, expected))


def test_gradients_forgotten_in_the_middle_of_a_step_are_missed(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Half of the parameters would have been updated, and the rest never."""
    ours = parameters(SIZES, dtype=torch.bfloat16)
    swapped = bench.adamw(ours, buffer_count=1)
    set_gradients(ours, 0)
    swapped.step()
    bench.engine.inject("read 3 errno 5")
    with pytest.raises(SwapReadError):
        swapped.step()
    assert swapped.step_is_unfinished
    for parameter in ours:
        parameter.grad = None  # as model.zero_grad() does
    with pytest.raises(SwapUsageError, match="forgotten"):
        swapped.step()


def test_step_when_the_disk_never_answers_times_out_and_loses_nothing(
    tmp_path: Path, parameters: MakeParameters
) -> None:
    """Else a dead drive hangs the job until somebody looks."""
    bench = Bench(tmp_path, timeout_s=0.3)
    ours = parameters(SIZES, dtype=torch.bfloat16)
    expected = reference(parameters(SIZES, dtype=torch.bfloat16), 2)
    swapped = bench.adamw(ours, buffer_count=2)
    set_gradients(ours, 0)
    swapped.step()
    swapped.flush()
    bench.engine.inject("read 1 never")
    set_gradients(ours, 1)
    with pytest.raises(SwapTimeoutError):
        swapped.step()
    bench.engine.inject("read 1000000 errno 5")  # the drive is back
    swapped.step()
    swapped.flush()
    assert all(map(torch.equal, ours, expected))
    bench.close()


@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    faults=st.lists(
        st.tuples(
            st.sampled_from(["read", "write"]),
            st.integers(1, 30),
            st.sampled_from(["errno 5", "errno 28", "short 512", "busy", "flip", "delay 1"]),
        ),
        max_size=4,
    ),
    buffer_count=st.integers(1, 4),
)
def test_steps_under_any_faults_are_exact_in_the_end(
    tmp_path_factory: pytest.TempPathFactory,
    parameters: MakeParameters,
    faults: list[tuple[str, int, str]],
    buffer_count: int,
) -> None:
    """Never wrong, never stuck: trying again always leads to the values of a run in RAM."""
    ours = parameters([37, 20_000], dtype=torch.bfloat16)
    expected = reference(parameters([37, 20_000], dtype=torch.bfloat16), 3)
    bench = Bench(tmp_path_factory.mktemp("faults"))
    try:
        swapped = bench.adamw(ours, buffer_count=buffer_count)
        script = "; ".join(f"{d} {n} {what}" for d, n, what in faults)
        bench.engine.inject(script or "read 1000000 errno 5")
        for step in range(3):
            set_gradients(ours, step)
            for _ in range(12):
                try:
                    swapped.step()
                    break
                except SwapError:
                    continue
            else:
                pytest.fail("the step never succeeded")
        _flush_in_the_end(swapped)
        assert all(map(torch.equal, ours, expected))
        assert all(pool.stats().in_use_count <= buffer_count for pool in bench.pools)
    finally:
        bench.close()


def _flush_in_the_end(swapped: SwappedOptimizer) -> None:
    for _ in range(12):
        try:
            return swapped.flush()
        except SwapError:
            continue
    raise AssertionError("the last writes never succeeded")


def test_write_that_the_drive_corrupted_is_found_by_the_next_read(
    bench: Bench, parameters: MakeParameters
) -> None:
    """What is lost is lost, but nobody trains on with it."""
    ours = parameters(SIZES, dtype=torch.bfloat16)
    swapped = bench.adamw(ours, buffer_count=1)
    set_gradients(ours, 0)
    swapped.step()
    swapped.flush()
    with bench.store.path("sub_group.3").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    for _ in range(2):
        with pytest.raises(SwapChecksumError):
            swapped.step()
    with pytest.raises(SwapUsageError, match="half-way"):
        swapped.zero_grad()


class Breaks(torch.optim.SGD):
    """Raises in the middle of a sub-group, once, when told to."""

    in_pieces = -1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        Breaks.in_pieces -= 1
        if Breaks.in_pieces == 0:
            raise RuntimeError("in the middle")
        return result


def test_update_that_broke_in_the_middle_is_undone(
    bench: Bench, parameters: MakeParameters
) -> None:
    """It must not count twice. With masters on NVMe the step can be taken again."""
    ours = parameters(SIZES, dtype=torch.float16)
    masters = masters_of(ours)
    swapped = bench.optimizer(Breaks, ours, lr=0.1, momentum=0.9)
    resident = torch.optim.SGD(masters, lr=0.1, momentum=0.9, fused=True)
    for step in range(3):
        set_gradients(ours, step)
        for master, parameter in zip(masters, ours, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        resident.step()
        Breaks.in_pieces = 2
        with pytest.raises(RuntimeError, match="in the middle"):
            swapped.step()
        swapped.step()
    assert all(map(torch.equal, ours, [master.half() for master in masters]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_in_place_that_broke_is_refused_until_a_state_is_loaded(
    bench: Bench, parameters: MakeParameters, dtype: torch.dtype
) -> None:
    """A parameter in memory that is its own master, or half of it, can't be undone."""
    ours = parameters(SIZES, dtype=dtype)
    swapped = bench.optimizer(Breaks, ours, lr=0.1, momentum=0.9)
    set_gradients(ours, 0)
    swapped.step()
    saved = copy.deepcopy(swapped.state_dict())
    values = [parameter.detach().clone() for parameter in ours]
    set_gradients(ours, 1)
    Breaks.in_pieces = 2
    with pytest.raises(RuntimeError, match="in the middle"):
        swapped.step()
    with pytest.raises(SwapUsageError, match="checkpoint"):
        swapped.step()
    with torch.no_grad():
        for parameter, value in zip(ours, values, strict=True):
            parameter.copy_(value)
    swapped.load_state_dict(saved)
    others = [torch.nn.Parameter(value.clone()) for value in values]
    fresh = bench_of_its_own(bench, others)
    fresh.load_state_dict(saved)
    for params, optimizer in ((ours, swapped), (others, fresh)):
        set_gradients(params, 1)
        optimizer.step()
    assert all(map(torch.equal, ours, others))
    fresh.close()


def bench_of_its_own(bench: Bench, params: list[torch.nn.Parameter]) -> SwappedOptimizer:
    folder = bench.nvme_path / "other"
    folder.mkdir()
    return SwappedOptimizer(
        torch.optim.SGD, params, lr=0.1, momentum=0.9, nvme_path=folder, pin_memory=False
    )
