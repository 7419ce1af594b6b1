"""The C code alone, many threads, every backend, under faults and under the compiler's watch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
STRESS = Path(__file__).with_name("native_stress.c")


@pytest.mark.parametrize("sanitizer", ("address,undefined", "thread"))
def test_threads_under_faults_leave_no_trace_in_the_sanitizers(
    tmp_path: Path, sanitizer: str
) -> None:
    """Else a byte too many, a use after free or a race shows up as a wrong weight one day."""
    compiler = shutil.which("gcc") or pytest.skip("no gcc")
    sources = [str(path) for path in (*sorted(NATIVE.glob("*.c")), STRESS)]
    program = tmp_path / "native_stress"
    flags = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all"]
    libraries = ["-laio", "-luring", "-lpthread"]
    subprocess.run([compiler, *flags, f"-fsanitize={sanitizer}", *sources, *libraries,
                    "-o", str(program)], check=True)
    # The thread sanitizer of older compilers can't live with much address randomisation.
    command = ["setarch", "-R", str(program), str(tmp_path / "stress.swp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
