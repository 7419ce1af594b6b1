"""Tidiness as a test: the rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nvmeswap"
README = (ROOT / "README.md").read_text()
BANNED_NAMES = {"utils", "util", "helpers", "common", "misc"}
MOST_LINES = 450
ENTRY_POINTS = {
    "nvmeswap.deepspeed.__main__", "nvmeswap.deepspeed.hook",
    "nvmeswap.examples.finetune_hf", "nvmeswap.examples.train_lm",
}


def sources(*folders: str) -> list[Path]:
    """The project's own files in C and Python."""
    return sorted(
        path
        for folder in folders
        for pattern in ("*.py", "*.pyi", "*.c", "*.h")
        for path in (ROOT / folder).rglob(pattern)
        if path.name != "_native.c"  # generated
    )


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Every name that could be a module imported by the file at `path`, but for its types alone."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_every_module_is_used() -> None:
    """A module that nothing imports is dead, or its test is missing."""
    files = [path for path in sources("nvmeswap", "tests", "bench") if path.suffix == ".py"]
    used = {
        name for path in files for name in imported_modules(path) if name != module_name(path)
    }
    used |= set(re.findall(r"from (nvmeswap\S+) import", README))
    modules = {module_name(path) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    assert modules - used - ENTRY_POINTS == set()


def test_only_one_module_meets_c() -> None:
    """Buffers handed to C are kept alive in one place; a second one would forget it."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("nvmeswap._native") for name in imported_modules(path))
    }
    assert users == {"io/native.py"}


def test_names_say_what_is_inside() -> None:
    named = sources("nvmeswap", "native", "tests", "bench")
    assert [path for path in named if path.stem in BANNED_NAMES] == []


def test_files_are_short() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): count
        for path in sources("nvmeswap", "native", "tests", "bench")
        if (count := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_tests_that_need_a_gpu_are_found_by_gpu_check() -> None:
    """It takes them by the names of their files."""
    needs = re.compile(r"skipif\(\s*not torch\.cuda\.is_available")
    others = [path for path in sources("tests") if "cuda" not in path.stem]
    assert [path.name for path in others if needs.search(path.read_text())] == []


@pytest.mark.parametrize("command", sorted(set(re.findall(r"(?m)^\./(\S+)", README))))
def test_readme_commands_exist(command: str) -> None:
    assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("module", sorted(set(re.findall(r"-m (nvmeswap\S+)", README))))
def test_readme_modules_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
