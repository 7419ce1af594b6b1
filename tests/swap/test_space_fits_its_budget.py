"""A swap space takes what the budget allows, or refuses before anything was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapBudgetError, SwapPathError
from nvmeswap.memory.pool import SlotClass
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace, fit

MIB = 1 << 20


def request(*classes: tuple[int, int], shrinks: bool = True) -> PoolRequest:
    return PoolRequest([SlotClass(nbytes, count) for nbytes, count in classes], shrinks)


def nbytes(requests: dict[str, PoolRequest]) -> int:
    return sum(each.nbytes for each in requests.values())


def test_budget_between_smallest_and_wanted_takes_slots_away() -> None:
    """Else a user with little memory has to find working counts by trial.  field case P04"""
    pools = {"a": request((MIB, 10), (8 * MIB, 4)), "b": request((2 * MIB, 3))}
    for budget_mib in range(11, 60):
        fitted = fit(pools, budget_mib * MIB, pin_memory=False)
        assert nbytes(fitted) <= budget_mib * MIB
        assert all(each.count >= 1 for pool in fitted.values() for each in pool.classes)
    assert fit(pools, None, pin_memory=False) == fit(pools, 100 * MIB, pin_memory=False)


def test_budget_below_the_smallest_is_refused_with_the_smallest_that_works() -> None:
    """Else the job dies in the middle for lack of buffers.  field cases B01, P01"""
    pools = {"a": request((MIB, 10), (8 * MIB, 4)), "b": request((2 * MIB, 3), shrinks=False)}
    with pytest.raises(SwapBudgetError) as raised:
        fit(pools, 14 * MIB, pin_memory=False)
    assert raised.value.smallest_nbytes == 15 * MIB
    assert nbytes(fit(pools, raised.value.smallest_nbytes, pin_memory=False)) == 15 * MIB


def test_refused_space_leaves_no_file_and_no_memory(tmp_path: Path) -> None:
    """The check comes before the first allocation."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SwapBudgetError):
        SwapSpace(
            Placement((tmp_path,), "run"),
            {"a": request((1 << 50, 1))},
            swap=SwapBlock(),
            aio=AioConfig(),
            pin_memory=False,
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_space_on_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """field case M01"""
    with pytest.raises(SwapPathError):
        SwapSpace(
            Placement((tmp_path / "missing",), "run"), {}, swap=SwapBlock(), aio=AioConfig(),
            pin_memory=False,
        )
