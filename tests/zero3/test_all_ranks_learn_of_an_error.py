"""An error on one rank is raised on all, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

from tests.zero3.ranks import run_ranks


def test_damaged_file_on_one_rank_stops_the_step_on_all(tmp_path: Path) -> None:
    """Else the healthy rank would hang in its next collective, or train on with garbage."""
    raised = run_ranks(2, "one_rank_reads_garbage", tmp_path, mesh_shapes=[(1, 2), (2, 1)])
    assert raised == [["SwapPeerError"] * 2, ["SwapChecksumError"] * 2]


def test_states_of_no_use_on_one_rank_are_told_to_all(tmp_path: Path) -> None:
    """The others would have waited in their collective until it times out."""
    raised = run_ranks(2, "one_rank_is_torn", tmp_path)
    assert raised == [["SwapPeerError", "SwapUsageError"], ["SwapUsageError"] * 2]


def test_ranks_do_not_wait_for_one_that_raised(tmp_path: Path) -> None:
    first, second = run_ranks(2, "others_hear_of_anything", tmp_path)
    assert first == ["SwapPeerError", "SwapUsageError", "SwapPeerError"]
    assert second == ["SwapPathError", "SwapUsageError", "SwapUsageError"]
