"""Step `tests`: pytest of all tests that need a GPU, those in files called test_*cuda*.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from gpu_told import Options, detail, figure, note, options, skip

ROOT = Path(__file__).resolve().parents[1]
_OUTCOME = re.compile(r"\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_NAME = re.compile(r"\S+\.py::\S.*?(?= (?:PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b|$)")
_TOLD_LINES = 400  # of names and errors of those that failed
_TELL_EVERY_S = 2.0
_TEST_S = 90
_MOST_WORKERS = 12  # each has a context of its own on the GPU


def command(given: Options, files: list[str]) -> list[str]:
    made = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider",
            f"--basetemp={given.folder / 'pytest'}", *files]
    if importlib.util.find_spec("pytest_timeout") is not None:
        made.append(f"--timeout={_TEST_S}")
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) - 2)
    if importlib.util.find_spec("xdist") is not None and workers > 1:
        made += ["-n", str(workers), "--dist", "worksteal"]
    return made


def main(given: Options) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*cuda*.py"))
    if not files:
        skip("no file tests/**/test_*cuda*.py")
    detail("files", files)
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    errors: list[str] = []
    told_s = time.monotonic()
    process = subprocess.Popen(command(given, files), cwd=ROOT, text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("E ", "____")) and len(errors) < _TOLD_LINES:
            errors.append(line.rstrip()[:300])
        print(line, end="", file=sys.stderr)
        outcome, name = _OUTCOME.search(line), _NAME.search(line)
        is_summary = line.startswith(("FAILED ", "ERROR "))  # which has them again
        if outcome is None or name is None or is_summary:
            continue
        outcomes[outcome[1]] += 1
        if time.monotonic() > told_s + _TELL_EVERY_S:
            detail("outcomes", dict(outcomes))
            told_s = time.monotonic()
        if outcome[1] in ("FAILED", "ERROR"):
            failed.append(name[0].strip())
            note(f"{outcome[1].lower()}: {failed[-1]}")
    status = process.wait()
    detail("outcomes", dict(outcomes))
    figure("tests_passed", outcomes["PASSED"], target=1)
    figure("tests_skipped", outcomes["SKIPPED"])
    bad = len(failed) + (status not in (0, 1))  # 1: some failed
    figure("tests_failed", bad, target=0, at_most=True)
    if status:
        detail("errors", errors)


if __name__ == "__main__":
    main(options(__doc__))
