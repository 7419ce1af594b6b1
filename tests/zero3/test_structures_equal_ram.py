"""Every structure of model and every loop trains from NVMe as it does in RAM, bit for bit."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

import tests.zero3.loops
import tests.zero3.structures  # noqa: F401
from tests.oracle import first_difference
from tests.zero3.programs import Program, run_in_ram, run_swapped
from tests.zero3.ranks import run_ranks

BUFFER_COUNTS = (1, 2, 3, 64)


def names_for(ranks: int) -> list[str]:
    """Programs that any number of ranks can run, and those for a mesh of so many."""
    return [
        name
        for name, program in Program.known.items()
        if program.mesh_shape is None
        or program.mesh_shape[0] * program.mesh_shape[-1] == ranks
    ]


@pytest.mark.parametrize("name", names_for(1))
def test_program_on_one_rank_with_one_slot_equals_ram(
    one_rank: None, tmp_path: Path, name: str
) -> None:
    """field cases N01, N02, N03, N04, D07, D08, D12, E05, P01, P02"""
    program = Program.known[name]
    difference = first_difference(run_swapped(program(), tmp_path, 1), run_in_ram(program()))
    assert difference is None


def test_programs_on_two_ranks_equal_ram(tmp_path: Path) -> None:
    """One launch for all, with few and many slots in turn."""
    run_ranks(
        2, "programs_equal_ram", tmp_path, names=dict(zip(names_for(2), cycle(BUFFER_COUNTS)))
    )


def test_experts_in_groups_of_their_own_that_ranks_choose_differently_are_refused(
    tmp_path: Path,
) -> None:
    """FSDP2 gathers half of each of two experts then, without a word. The next steps are good."""
    raised = run_ranks(2, "ranks_choose_other_experts", tmp_path)
    assert raised == [["SwapUsageError"]] * 2
