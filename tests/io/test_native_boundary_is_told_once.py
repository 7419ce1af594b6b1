"""What Python is told about the C code is what the C code is."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from nvmeswap._native import ffi, lib
from nvmeswap.io import Direction, DirectMode, Lane
from nvmeswap.stats import EngineStats

PACKAGE = Path(__file__).parents[2] / "nvmeswap"


def test_stub_names_what_the_library_has() -> None:
    """Else mypy approves of calls that don't exist."""
    tree = ast.parse((PACKAGE / "_native.pyi").read_text())
    stub = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "_Lib")
    names = {n.target.id for n in stub.body if isinstance(n, ast.AnnAssign)}
    names |= {n.name for n in stub.body if isinstance(n, ast.FunctionDef)}
    assert names == set(dir(lib))


def test_python_enums_and_statistics_match_the_c_ones() -> None:
    """Else a read becomes a write, or a counter shows another one's value."""
    assert {d.name: d.value for d in Direction} == {"READ": lib.NVS_READ, "WRITE": lib.NVS_WRITE}
    assert [lane.value for lane in Lane] == [lib.NVS_DEMAND, lib.NVS_PREFETCH, lib.NVS_WRITEBACK]
    assert [mode.value for mode in DirectMode] == [
        lib.NVS_DIRECT_OFF, lib.NVS_DIRECT_PREFER, lib.NVS_DIRECT_REQUIRE,
    ]
    c_names = [name for name, _ in ffi.typeof("nvs_stats").fields]
    assert [*c_names, "lanes"] == [field.name for field in fields(EngineStats)]


def test_only_one_file_meets_the_library() -> None:
    """Else unchecked return codes spread."""
    importers = {p.name for p in PACKAGE.rglob("*.py") if "_native import ffi" in p.read_text()}
    assert importers == {"native.py"}
