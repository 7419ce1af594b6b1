"""The C code alone, many threads and many schedules, every backend, under faults and under the
compiler's watch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
STRESS = Path(__file__).with_name("native_stress.c")
SCHEDULES = [Path(__file__).with_name(f"native_{part}.c") for part in ("schedules", "model")]
# Schedules wait more than they compute.
PROCESS_COUNT = 8


def build(program: Path, sources: list[Path], *flags: str) -> Path:
    compiler = shutil.which("gcc") or pytest.skip("no gcc")
    command = [
        compiler, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror", *flags,
        *map(str, (*sorted(NATIVE.glob("*.c")), *sources)),
        "-laio", "-luring", "-lpthread", "-o", str(program),
    ]
    subprocess.run(command, check=True)
    return program


def sanitizing(sanitizer: str) -> tuple[str, ...]:
    return ("-O1", "-fno-sanitize-recover=all", f"-fsanitize={sanitizer}")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of schedules would wear a drive out."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as made:
        yield Path(made)


def run_schedules(program: Path, folders: list[Path], count: int) -> None:
    """`count` schedules in each of some processes, of which each has a folder of the list. Each
    process tells the number of the schedule that fails: `native_schedules FOLDER NUMBER 1` runs
    that alone."""
    # The thread sanitizer of older compilers can't live with much address randomisation.
    processes = [
        subprocess.Popen(["setarch", "-R", str(program), str(folder), str(index * count),
                          str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index, folder in enumerate(folders)
    ]
    try:
        ended = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    problems = [errors for _, errors in ended if errors]
    assert problems == []
    assert [output for output, _ in ended] == [f"{count} schedules\n"] * len(folders)


@pytest.mark.parametrize("sanitizer", ("address,undefined", "thread"))
def test_threads_under_faults_leave_no_trace_in_the_sanitizers(
    tmp_path: Path, sanitizer: str
) -> None:
    """Else a byte too many, a use after free or a race shows up as a wrong weight one day."""
    program = build(tmp_path / "native_stress", [STRESS], *sanitizing(sanitizer))
    command = ["setarch", "-R", str(program), str(tmp_path / "stress.swp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow
def test_ten_thousand_schedules_bring_no_wrong_byte_no_hang_and_no_leak(
    tmp_path: Path, memory_path: Path
) -> None:
    """Else some order of faults that nobody thought of corrupts weights or stops a run for good.
    field case A07, A08"""
    program = build(tmp_path / "native_schedules", SCHEDULES, "-O2", "-ftree-vectorize")
    run_schedules(program, [memory_path] * PROCESS_COUNT, 10_000 // PROCESS_COUNT)
    # A drive answers in another order than memory, and insists on alignment.
    run_schedules(program, [tmp_path] * PROCESS_COUNT, 50)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ("address,undefined", "thread"))
def test_schedules_leave_no_trace_in_the_sanitizers(
    tmp_path: Path, memory_path: Path, sanitizer: str
) -> None:
    """Else memory of a request is lost or used too long on a path that only a fault takes."""
    program = build(tmp_path / "native_schedules", SCHEDULES, *sanitizing(sanitizer))
    run_schedules(program, [memory_path] * 4, 125)
