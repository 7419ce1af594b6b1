"""Many tensors by name beside DeepSpeed's asynchronous handle, which has a file for each.

    python bench/vs_deepspeed_io.py --path /mnt/nvme --deepspeed-python venv/bin/python

DeepSpeed needs `pip install deepspeed==0.19.8 --no-build-isolation` after torch, with ninja and
libaio's headers; its first run compiles for some minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from machine import facts
from report import Report, Samples, cpu, parser
from small_tensors import Load, Swapped
from worker import Worker, WorkerFailed

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

_WAYS = ("write", "read")


class DeepSpeed:
    """The worker process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def prepare(self, folder: Path, load: Load) -> None:
        """Make tensors and files, and write them once."""
        self._worker.ask(folder=str(folder), nbytes=load.nbytes, count=load.count)
        self._nbytes = load.nbytes * load.count
        self.both()

    def both(self) -> Samples:
        """All tensors, once each way."""
        return {way: Usage(self._nbytes, **self._worker.ask(way=way)) for way in _WAYS}


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
        with own_folder(options.path) as folder, Worker(
            options.deepspeed_python, "deepspeed_handle.py"
        ) as worker:
            for load in loads:
                measure(report, DeepSpeed(worker), folder, load)
    except WorkerFailed as error:
        print(
            f"DeepSpeed's handle does not work in {options.deepspeed_python}: {error}\n"
            "name an interpreter that has it with --deepspeed-python; it needs "
            "`pip install deepspeed==0.19.8 --no-build-isolation`, ninja and libaio's headers",
            file=sys.stderr,
        )
        return 1
    report.write(options.json, facts(options.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
