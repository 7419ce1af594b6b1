"""Many tensors by name beside DeepSpeed's asynchronous handle, which has a file for each.

    python bench/vs_deepspeed_io.py --path /mnt/nvme --deepspeed-python venv/bin/python

DeepSpeed needs `pip install deepspeed==0.19.8 --no-build-isolation` after torch, with ninja and
libaio's headers; its first run compiles for some minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from machine import facts
from report import Report, Samples, cpu, parser
from small_tensors import Load, Swapped

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

_WORKER = Path(__file__).with_name("deepspeed_handle.py")
_WAYS = ("write", "read")


class DeepSpeedMissing(Exception):
    """The interpreter can't import DeepSpeed, or its handle does not work there."""


class DeepSpeed:
    """The worker process. Between requests it uses no processor."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            [python, str(_WORKER)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._answer()

    def prepare(self, folder: Path, load: Load) -> None:
        """Make tensors and files, and write them once."""
        self._ask(folder=str(folder), nbytes=load.nbytes, count=load.count)
        self._nbytes = load.nbytes * load.count
        self.both()

    def both(self) -> Samples:
        """All tensors, once each way."""
        return {way: Usage(self._nbytes, **self._ask(way=way)) for way in _WAYS}

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip().split("\n")[-1]
            raise DeepSpeedMissing(
                f"DeepSpeed's handle does not work in {self._python}: {last}\n"
                "name an interpreter that has it with --deepspeed-python; it needs "
                "`pip install deepspeed==0.19.8 --no-build-isolation`, ninja and libaio's headers"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> DeepSpeed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def measure(report: Report, deepspeed: DeepSpeed, folder: Path, load: Load) -> None:
    """`tensors_..._write`, `tensors_..._read` and `cpu_per_gb_..._over_deepspeed`, ours over
    DeepSpeed's. Ours are stored twice as many and every other one is taken; DeepSpeed's are all its
    files."""
    files = folder / load.name
    files.mkdir()
    deepspeed.prepare(files, load)
    ours = Swapped(folder, load, queue_depth=32)
    found = report.rounds(f"tensors {load.name}", {
        "deepspeed": deepspeed.both, "ours": ours.scattered,
    })
    ours.close()
    for way in _WAYS:
        report.figure(f"tensors_{load.name}_{way}", found.ratio("ours", "deepspeed", way))
    costs = {
        variant: sum(found.median(variant, way, cpu) for way in _WAYS)
        for variant in ("ours", "deepspeed")
    }
    report.figure(f"cpu_per_gb_{load.name}_over_deepspeed", costs["ours"] / costs["deepspeed"])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON",
                           help="an interpreter that has DeepSpeed")
    options = arguments.parse_args()
    report = Report(round_count=3 if options.quick else 5)
    share = 4 if options.quick else 1
    loads = (Load("4k", 4 << 10, 8192 // share), Load("64k", 64 << 10, 4096 // share))
    try:
        with own_folder(options.path) as folder, DeepSpeed(options.deepspeed_python) as deepspeed:
            for load in loads:
                measure(report, deepspeed, folder, load)
    except DeepSpeedMissing as error:
        print(error, file=sys.stderr)
        return 1
    report.write(options.json, facts(options.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
