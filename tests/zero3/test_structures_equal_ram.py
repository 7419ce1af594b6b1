"""Every structure of model and every loop trains from NVMe as it does in RAM, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.zero3.loops
import tests.zero3.structures  # noqa: F401
from tests.oracle import first_difference
from tests.zero3.programs import Program, run_in_ram, run_swapped


@pytest.mark.parametrize("name", [n for n, p in Program.known.items() if p.mesh_shape is None])
def test_program_on_one_rank_equals_ram(one_rank: None, tmp_path: Path, name: str) -> None:
    program = Program.known[name]()
    difference = first_difference(run_swapped(program, tmp_path, 1), run_in_ram(program))
    assert difference is None
