"""Each transfer of two steps fails once, in each way: the error is typed, trying again is exact."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.config import SwapBlock
from nvmeswap.errors import (
    SwapBudgetError,
    SwapChecksumError,
    SwapError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.conftest import Bench
from tests.swap.twins import ADAMW, BF16, FP32, Twins, parameters_of

NOTHING = "read 1000000 errno 5"
# In sub-groups of 4096 elements there are five of them, with masters of all forms.
SHAPES = [(37,), (5000,), (9000,), (3000,)]
DTYPES = [FP32, BF16, torch.float16, FP32]
MOST_TRANSFERS = 12


def twins_over(bench: Bench, *, slot_count: int | None = None, overlap: bool = False) -> Twins:
    def make(groups: Any) -> SwappedOptimizer:
        optimizer = bench.optimizer(
            ADAMW.kind, groups, buffer_count=2, slot_count=slot_count, **ADAMW.options
        )
        if overlap:
            optimizer.overlap_backward(OverlapSettings())
        return optimizer

    return Twins(ADAMW, parameters_of(SHAPES, DTYPES), make)


def backward_through_autograd(twins: Twins, seed: int) -> None:
    """Gradients that depend on the seed alone, and on their way the overlapped update."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for parameter, master in zip(twins.params, twins.masters, strict=True):
        weights = torch.randn(parameter.shape, generator=generator)
        master.grad = weights.to(parameter.dtype).to(FP32)
        total = total + (parameter.to(FP32) * weights).sum()
    total.backward()


def one_step(twins: Twins, seed: int, *, overlap: bool) -> None:
    if overlap:
        backward_through_autograd(twins, seed)
        twins.plain.step()
    else:
        twins.backward(seed)
        twins.step_plain()


def step_until_it_succeeds(
    twins: Twins, bench: Bench, kind: type[SwapError], number: int | None
) -> int:
    """How often it failed."""
    for failure_count in range(4):
        try:
            twins.swapped.step()
        except SwapError as error:
            assert isinstance(error, kind) and error.errno == number
            assert twins.swapped.step_is_unfinished
            for refused in (twins.swapped.zero_grad, twins.swapped.state_dict):
                with pytest.raises(SwapUsageError):
                    refused()
            if kind is SwapTimeoutError:
                bench.engine.inject(NOTHING)  # the drive is back
        else:
            return failure_count
    raise AssertionError("the step never succeeded")


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("slot_count", [2, 4], ids=["swapped", "some in memory"])
@pytest.mark.parametrize(
    ("direction", "action", "kind", "number"),
    [
        ("read", "errno 5", SwapReadError, errno.EIO),
        ("read", "short 0", SwapReadError, None),
        ("read", "flip", SwapChecksumError, None),
        ("read", "never", SwapTimeoutError, None),
        ("write", "errno 5", SwapWriteError, errno.EIO),
        ("write", "errno 28", SwapSpaceError, errno.ENOSPC),
        ("write", "short 0", SwapWriteError, None),
        ("write", "never", SwapTimeoutError, None),
    ],
)
def test_step_in_which_any_transfer_failed_can_be_taken_again(
    tmp_path: Path,
    direction: str,
    action: str,
    kind: type[SwapError],
    number: int | None,
    slot_count: int,
    overlap: bool,
) -> None:
    """Else an update is lost, or made twice, and nobody knows."""
    never = action == "never"
    failure_counts = []
    for n in (1, 4) if never else range(1, MOST_TRANSFERS):
        folder = tmp_path / str(n)
        folder.mkdir()
        bench = Bench(folder, timeout_s=0.2 if never else 20)
        twins = twins_over(bench, slot_count=slot_count, overlap=overlap)
        one_step(twins, 0, overlap=overlap)
        twins.swapped.step()
        twins.swapped.zero_grad()
        bench.engine.inject(f"{direction} {n} {action}")
        failure_counts.append(0)
        for step in (1, 2):
            one_step(twins, step, overlap=overlap)
            failure_counts[-1] += step_until_it_succeeds(twins, bench, kind, number)
            twins.swapped.zero_grad()
        bench.engine.inject(NOTHING)
        twins.assert_same()
        assert twins.swapped.stats().step_count == 3
        bench.close()
    assert 1 in failure_counts[:4] and max(failure_counts) == 1
