"""DeepSpeed's own tests of its I/O engine, run against ours.

    python tests/peers/deepspeed_engine/suite.py [--checkout DIR]

needs `DS_BUILD_OPS=0 pip install deepspeed==0.19.8 --no-build-isolation`. The tests come from DIR,
a checkout of DeepSpeed, or from GitHub's archive of that version; nothing of them is kept. On a CPU
DeepSpeed's test harness compiles its op for shared memory once (ninja and a C++ compiler).
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import torch

VERSION = "0.19.8"
ARCHIVE = f"https://github.com/deepspeedai/DeepSpeed/archive/refs/tags/v{VERSION}.tar.gz"
FILES = ("unit/v1/nvme/test_aio.py", "unit/v1/nvme/test_pinned_manager.py")
# Those cases that need no GPU; with one there are 104.
PASSED_ON_CPU = {"test_aio": 52, "test_pinned_manager": 5}
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Outcome:
    """Of one test file."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0


def bring_tests(folder: Path, checkout: Path | None) -> None:
    """DeepSpeed's tests to `folder`/tests, without its package, which would hide the installed one.
    Raises OSError when they can't be had."""
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


def run(folder: Path) -> dict[str, Outcome]:
    """Runs the tests there; the outcome by test file."""
    report = folder / "report.xml"
    paths = [str(Path(__file__).with_name("on_import")), str(ROOT)]
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [inherited])])}
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider",
               f"--junitxml={report}", "-o", "junit_family=xunit1", *FILES]
    subprocess.run(command, cwd=folder / "tests", env=environment, check=False)
    outcomes: dict[str, Outcome] = {Path(name).stem: Outcome() for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = outcomes[Path(case.attrib["file"]).stem]
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    return outcomes


def main() -> int:
    """Prints the counts; the exit status is 1 when a case failed or too few were run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="a checkout of DeepSpeed")
    checkout = parser.parse_args().checkout
    with tempfile.TemporaryDirectory() as folder:
        bring_tests(Path(folder), checkout)
        outcomes = run(Path(folder))
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.passed} passed, {outcome.skipped} skipped, "
              f"{outcome.failed} failed")
    return int(any(
        outcome.failed or outcome.passed < PASSED_ON_CPU[name]
        for name, outcome in outcomes.items()
    ))


if __name__ == "__main__":
    sys.exit(main())
