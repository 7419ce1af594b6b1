"""Saved on two ranks, resumed on one, two and three: every value and, where sums have the same
order, every later loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.zero3.checkpoint_ranks import MODULE, RESUMED, resume
from tests.zero3.ranks import run_ranks

# With another world size a gradient's parts are added in another order, so its last bits differ
# (seen: losses by 1e-7 of themselves in fp32, not at all in bf16). Adam may turn the last bit of a
# tiny gradient into more; in bf16 a weight then rounds to its neighbour, 2**-8 away.
SOME = {"built in bf16": 2e-3, "resident parameters": 1e-4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder of checkpoints that two ranks saved, and what became of them when they resumed."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, "save_and_resume", folder, MODULE, checkpoints=folder)


def test_on_as_many_ranks_all_later_bits_are_the_same(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    """field cases F01, F05"""
    for outcome in saved[1]:
        assert list(outcome) == RESUMED
        for name, (differing, ours, losses, still) in outcome.items():
            assert (differing, still) == ([], []), name
            assert ours == losses, name


def test_on_one_rank_all_restored_bits_are_the_same(
    one_rank: None, saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """field case F07"""
    for name, (differing, ours, losses, _) in resume(tmp_path, saved[0], list(SOME)).items():
        assert differing == [], name
        assert ours == pytest.approx(losses, rel=SOME[name]), name


def test_on_three_ranks_all_restored_bits_are_the_same(
    saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """field case F07"""
    for outcome in run_ranks(3, "resume", tmp_path, MODULE, checkpoints=saved[0], kinds=list(SOME)):
        for name, (differing, ours, losses, _) in outcome.items():
            assert differing == [], name
            assert ours == pytest.approx(losses, rel=SOME[name]), name
