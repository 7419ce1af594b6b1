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
GDS = Path(__file__).with_name("native_gds.c")
FAKES = Path(__file__).with_name("fake_gds")
SCHEDULES = [Path(__file__).with_name(f"native_{part}.c") for part in ("schedules", "model")]
# Schedules wait more than they compute.
PROCESS_COUNT = 8


SANITIZERS = ("address,undefined", "thread")


class Programs:
    """Built of the engine and some files; the engine is compiled once for each set of flags."""

    def __init__(self, folder: Path) -> None:
        self.compiler = shutil.which("gcc") or pytest.skip("no gcc")
        self.folder = folder
        self.engines: dict[tuple[str, ...], list[Path]] = {}

    def build(self, name: str, sources: list[Path], *flags: str) -> Path:
        if flags not in self.engines:
            objects = self.folder / f"engine{len(self.engines)}"
            objects.mkdir()
            self.run("-c", *flags, *map(str, sorted(NATIVE.glob("*.c"))), folder=objects)
            self.engines[flags] = sorted(objects.iterdir())
        program = self.folder / f"{name}{len(self.engines)}"
        parts = map(str, (*self.engines[flags], *sources))
        self.run(*flags, *parts, "-laio", "-luring", "-lpthread", "-ldl", "-o", str(program))
        return program

    def run(self, *arguments: str, folder: Path | None = None) -> None:
        command = [self.compiler, "-std=c11", "-g", "-Wall", "-Wextra", "-Werror",
                   f"-I{NATIVE}", *arguments]
        subprocess.run(command, check=True, cwd=folder)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


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


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_under_faults_leave_no_trace_in_the_sanitizers(
    programs: Programs, tmp_path: Path, sanitizer: str
) -> None:
    """Else a byte too many, a use after free or a race shows up as a wrong weight one day."""
    program = programs.build("native_stress", [STRESS], *sanitizing(sanitizer))
    command = ["setarch", "-R", str(program), str(tmp_path / "stress.swp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_with_device_memory_leave_no_trace_in_the_sanitizers(
    programs: Programs, tmp_path: Path, sanitizer: str
) -> None:
    """Else a refusal of cuFile, which any thread may meet, is a race with the others' transfers.
    field case G01"""
    flags = sanitizing(sanitizer)
    libraries: list[Path] = []
    for name, source in (("libcuda.so.1", "cuda.c"), ("libcufile.so.0", "cufile.c")):
        made = tmp_path / name
        programs.run(*flags, "-shared", "-fPIC", f"-Wl,-soname,{name}", str(FAKES / source),
                     *map(str, libraries), "-o", str(made))
        libraries.append(made)
    program = programs.build("native_gds", [GDS, libraries[0]], *flags)
    for script in ("", "write=-5 after=60", "read=-5 after=200", "handle=5030"):
        done = subprocess.run(
            ["setarch", "-R", str(program), str(tmp_path)], capture_output=True, text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUFILE": script},
            timeout=200, check=False,
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow
def test_ten_thousand_schedules_bring_no_wrong_byte_no_hang_and_no_leak(
    programs: Programs, tmp_path: Path, memory_path: Path
) -> None:
    """Else some order of faults that nobody thought of corrupts weights or stops a run for good.
    field case A07, A08"""
    program = programs.build("native_schedules", SCHEDULES, "-O2", "-ftree-vectorize")
    run_schedules(program, [memory_path] * PROCESS_COUNT, 10_000 // PROCESS_COUNT)
    # A drive answers in another order than memory, and insists on alignment.
    run_schedules(program, [tmp_path] * PROCESS_COUNT, 50)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_schedules_leave_no_trace_in_the_sanitizers(
    programs: Programs, memory_path: Path, sanitizer: str
) -> None:
    """Else memory of a request is lost or used too long on a path that only a fault takes."""
    program = programs.build("native_schedules", SCHEDULES, *sanitizing(sanitizer))
    run_schedules(program, [memory_path] * 4, 125)
