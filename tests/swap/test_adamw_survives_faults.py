"""A failed transfer stops the step with a typed error; the step can be taken again and is exact."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

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
)
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
                swapped.flush()
                break
            except SwapError as failure:
                failures.append(failure)
                if not swapped.swapper.in_step:
                    swapped.flush()  # only a write was left
                    break
    assert failures and isinstance(failures[0], error)
    assert number is None or failures[0].errno == number
    assert failures[0].path is not None and failures[0].path.name == "optimizer.swp"
    assert all(map(torch.equal, ours, expected))


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
            taken = False
            for _ in range(12):
                try:
                    if not taken or swapped.swapper.in_step:
                        swapped.step()
                    taken = True
                    swapped.flush()
                    break
                except SwapError:
                    taken = taken or not swapped.swapper.in_step
            else:
                pytest.fail("the step never succeeded")
        assert all(map(torch.equal, ours, expected))
        assert all(pool.stats().in_use_count <= buffer_count for pool in bench.pools)
    finally:
        bench.close()
