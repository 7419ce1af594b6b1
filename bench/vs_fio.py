"""The engine and the tensor swapper beside fio, on one folder and in memory.

    python bench/vs_fio.py --path /mnt/nvme --json vs_fio.json
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

from checksums import measure_checksums
from fio import Fio, FioError, huge_pages
from lanes_demand import measure_demand
from large import measure_first_write, measure_large
from machine import facts
from memory_held import measure_memory
from report import Report, parser
from small_tensors import Load, measure_cost_of_one, measure_operations

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.io.filesystem import FilesystemWarning

SECTIONS = ("large", "first_write", "operations", "one", "demand", "checksums", "memory")
_SHM = Path("/dev/shm")


def main() -> int:
    arguments = parser(__doc__, SECTIONS)
    arguments.add_argument("--large", action="store_true", help="a file of 8 GiB, too")
    options = arguments.parse_args()
    report = Report(round_count=3 if options.quick else 5)
    warnings.simplefilter("ignore", FilesystemWarning)  # what is in memory is named so
    machine = facts(options.path)
    with own_folder(options.path) as folder, contextlib.ExitStack() as stack:
        shm = stack.enter_context(own_folder(_SHM)) if _SHM.is_dir() else None
        has_huge_pages = stack.enter_context(huge_pages())
        if not has_huge_pages:
            report.note("fio ran on plain memory: huge pages are root's to reserve")
        try:
            fio = Fio(huge_pages=has_huge_pages)
            run(report, fio, folder, shm, options.only, quick=options.quick, large=options.large)
        except FioError as error:
            print(error, file=sys.stderr)
            return 1
    report.write(options.json, machine)
    return 0


def run(
    report: Report, fio: Fio, folder: Path, shm: Path | None, sections: list[str], *, quick: bool,
    large: bool,
) -> None:
    """All sections asked for. Sizes are a quarter with `quick`."""
    gib = 1 << 28 if quick else 1 << 30
    if "memory" in sections:  # first: a fork copies the tables of all that the process holds
        measure_memory(report, folder, arena_nbytes=1 << 30)
    if "large" in sections:
        measure_large(report, fio, folder, gib)
        if large:
            measure_large(report, fio, folder, 8 << 30, suffix="_8g")
    if "first_write" in sections:
        measure_first_write(report, folder, gib)
    if "operations" in sections:
        share = 4 if quick else 1
        for load in (Load("4k", 4 << 10, 8192 // share), Load("64k", 64 << 10, 4096 // share)):
            fio_s = 0.15 if quick else 1.0
            measure_operations(report, fio, folder, load, fio_s=fio_s)
            if shm is not None:
                measure_operations(report, fio, shm, load, fio_s=fio_s, suffix="_shm")
    if "one" in sections:
        for count in (1000, 100_000):
            measure_cost_of_one(report, folder, count)
    if "demand" in sections:
        measure_demand(report, folder, sample_count=10 if quick else 30, nbytes=gib)
    if "checksums" in sections:
        measure_checksums(report, folder, gib)


if __name__ == "__main__":
    sys.exit(main())
