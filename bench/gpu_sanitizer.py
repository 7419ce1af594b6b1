"""Step `sanitizer`: the copy paths under compute-sanitizer's memcheck, and initcheck if there is
time, beside what that says of torch alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpu_told import Options, detail, figure, note, options, skip

_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SCRIPT = Path(__file__).with_name("gpu_copy_paths.py")
_TOLD_CHARACTERS = 6000


def run(
    command: list[str], given: Options, name: str, *, without_us: bool = False
) -> tuple[str, float]:
    """All that it printed; its end is kept in the JSON unless it is clean."""
    folder = given.folder / name
    folder.mkdir()
    began_s = time.monotonic()
    done = subprocess.run([*command, sys.executable, str(_SCRIPT),
                           "-" if without_us else str(folder), given.device],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    taken_s = time.monotonic() - began_s
    detail(f"{name}_s", taken_s)
    if done.returncode:
        note(f"{name}: status {done.returncode}")
    if done.returncode or (command and "ERROR SUMMARY: 0 errors" not in done.stdout):
        detail(f"{name}_output", done.stdout[-_TOLD_CHARACTERS:])
    return done.stdout, taken_s


def error_count(output: str) -> int | None:
    found = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    return int(found[-1]) if found else None


def main(given: Options) -> None:
    _, alone_s = run([], given, "without")
    if given.rehearses:
        skip("compute-sanitizer needs a GPU")
    tool = shutil.which("compute-sanitizer") or next(
        (found for place in _PLACES if (found := shutil.which("compute-sanitizer", path=place))),
        None)
    if tool is None:
        skip(f"no compute-sanitizer in PATH or {', '.join(_PLACES)}")
    taken_s = alone_s
    for name in ("memcheck", "initcheck"):
        if name == "initcheck" and given.left_s < 1.3 * taken_s:
            note("no time for initcheck")
            return
        # Errors that calls return are answers: torch and CUDA's libraries ask what they may do.
        output, taken_s = run([tool, "--tool", name, "--report-api-errors", "no"], given, name)
        count = error_count(output)
        if count is None:
            note(f"{name} gave no summary")
        else:
            finished = "all: done" in output
            figure(f"sanitizer_{name}_errors", count, at_most=True,
                   target=0 if name == "memcheck" else None)
            if not finished:
                figure(f"sanitizer_{name}_finished", 0.0, target=1.0)
    output, _ = run([tool, "--tool", "initcheck", "--report-api-errors", "no"], given, "torch",
                    without_us=True)
    count = error_count(output)
    if count is not None:
        figure("sanitizer_initcheck_errors_of_torch_alone", count)


if __name__ == "__main__":
    main(options(__doc__))
