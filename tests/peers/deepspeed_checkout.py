"""DeepSpeed's own tests: where they come from, and a run of some of them with ours put in.

They need `DS_BUILD_OPS=0 pip install deepspeed==0.19.8 --no-build-isolation`. Nothing of them is
kept. On a CPU DeepSpeed's test harness compiles its op for shared memory once (ninja and a C++
compiler).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

VERSION = "0.19.8"
ARCHIVE = f"https://github.com/deepspeedai/DeepSpeed/archive/refs/tags/v{VERSION}.tar.gz"
ROOT = Path(__file__).resolve().parents[2]
_CASE_TIMEOUT_S = 600


@dataclass(frozen=True)
class Case:
    """`result` is "passed", "skipped", "failed" or "hung"; `text` says why."""

    name: str
    result: str
    text: str = ""


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the argument that all suites have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--checkout", type=Path, help="a checkout of DeepSpeed")
    return made


def bring_tests(folder: Path, checkout: Path | None) -> None:
    """DeepSpeed's tests to `folder`/tests, from a checkout or from GitHub's archive, without its
    package, which would hide the installed one. Raises OSError when they can't be had."""
    if checkout is not None:
        shutil.copytree(checkout / "tests", folder / "tests")
        return
    with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
        content = io.BytesIO(answer.read())
    with tarfile.open(fileobj=content) as archive:
        for member in archive.getmembers():
            name = Path(*Path(member.name).parts[1:])
            file = archive.extractfile(member)
            if file is not None and name.parts[:1] == ("tests",) and ".." not in name.parts:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(file.read())


def run_tests(
    folder: Path,
    files: Sequence[str],
    *,
    call: str | None,
    expression: str = "",
    process_count: int = 1,
) -> dict[str, Case]:
    """Runs `files` under `folder`/tests, those cases that pytest's -k `expression` chooses, with
    the function `call` of nvmeswap.deepspeed called in every process that imports DeepSpeed, or as
    DeepSpeed is (None). A case that hangs is ended, and those after it are run all the same.
    Raises RuntimeError when cases pass although fewer than `process_count` processes called it:
    pytest's own is one, those that it starts to run tests are more."""
    marks = folder / "marks"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir()
    environment = _environment(folder, call)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider",
               "-p", "case_lines", "-k", expression, f"--basetemp={folder / 'swap'}",
               f"--timeout={_CASE_TIMEOUT_S}", "--timeout-method=thread", *files]
    found: dict[str, Case] = {}
    hung = True
    while hung:
        done = [f"--deselect={name}" for name in found]
        _run_group([*command, *done], folder / "tests", environment)
        cases = _read_cases(folder)
        hung = any(case.result == "hung" for case in cases.values())
        found |= cases
    passed = any(case.result == "passed" for case in found.values())
    if call is not None and passed and len(list(marks.iterdir())) < process_count:
        raise RuntimeError(f"nvmeswap.deepspeed.{call} was not called where the tests ran")
    return found


def _environment(folder: Path, call: str | None) -> dict[str, str]:
    beside = Path(__file__).parent
    paths = [str(beside / "reporting"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "NVMESWAP_PEER_REPORT": str(folder / "report")}
    if call is not None:
        paths.insert(0, str(beside / "on_import"))
        environment["NVMESWAP_PEER_CALL"] = call
        environment["NVMESWAP_PEER_MARKS"] = str(folder / "marks")
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment["LOCAL_SIZE"] = "2"  # else it counts sockets, and skips what needs two ranks
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run_group(command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    """Ends with all processes that the command left behind."""
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_cases(folder: Path) -> dict[str, Case]:
    """Of one run of pytest; the last word on each case counts."""
    report = folder / "report"
    lines = report.read_text().splitlines() if report.exists() else []
    report.unlink(missing_ok=True)
    return {line["name"]: Case(**line) for line in map(json.loads, lines)}
