"""Inference of a model that is not on its device: ours, diffusers' group offload, accelerate's.

    python bench/vs_offload_peers.py --path /mnt/nvme [--device cuda] [--plot PNG]

    pip install accelerate requests && pip install --no-deps diffusers==0.42.1   # the peers

Each is a process of its own; forwards of all are interleaved, two in a turn, of which the second
counts, each after its files were dropped from the page cache. fio reads as many bytes, directly,
in the same rounds. A peer that is missing or refuses is told, and left out. Speeds are those of
whole forwards.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fio import Fio, FioError, Job, huge_pages
from large import BLOCK_NBYTES, FIO_ENGINES, QUEUE_DEPTH
from machine import facts
from offload_model import Size
from offload_plot import draw
from offload_system import IMPORTS, PINNED
from report import Report, Rounds, Samples, parser, speed, wall
from rich.console import Console
from rich.table import Table
from worker import Worker, WorkerFailed

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.trial import TrialFile
from nvmeswap.cli.bench.usage import Usage
from nvmeswap.io.probe import probe_folder

_WARM_UP_TURNS = 1  # of two forwards; diffusers and ours see the order of blocks in the first
_FIO = "fio"
REFERENCE = "resident"
# Of 1.61 and 0.40 GB. A processor takes longer for bf16, or for more rows than one, than to read.
SIZES = {"cuda": Size(24, 4096, 4096, "bfloat16"), "cpu": Size(12, 4096, 1, "float32")}
QUICK = {"cuda": Size(24, 2048, 4096, "bfloat16"), "cpu": Size(12, 2048, 1, "float32")}


def is_on_disk(name: str) -> bool:
    return name.partition("_")[2].startswith(("nvme", "disk"))


@dataclass
class System:
    """A worker, as a variant of a round; `answers` of its forwards, `difference` of its output from
    the resident model's."""

    name: str
    worker: Worker
    size: Size
    answers: list[dict[str, Any]] = field(default_factory=list)
    difference: float | None = None

    @property
    def is_on_disk(self) -> bool:
        return is_on_disk(self.name)

    def forward(self) -> Samples:
        answer = self.worker.ask()
        self.answers.append(answer)
        nbytes = self.size.blocks_nbytes
        if self.is_on_disk:  # what was still in memory was not read
            nbytes = min(nbytes, answer["read_nbytes"])
        return {"forward": Usage(nbytes, answer["wall_s"], answer["cpu_s"])}

    def compare(self, expected: Path) -> None:
        if self.name != PINNED:
            found = self.worker.ask(expected=str(expected))
            self.difference = found["difference"] if found["is_finite"] else float("nan")

    def median(self, name: str) -> Any:
        return statistics.median(answer[name] for answer in self.answers)

    def most(self, name: str) -> Any:
        return max(answer.get(name, 0) for answer in self.answers)


@dataclass
class Comparison:
    """Where it runs, and of what size. `refused`: what each system that did not run said."""

    report: Report
    folder: Path
    device: str
    size: Size
    refused: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def started(self, names: Sequence[str]) -> Iterator[dict[str, System]]:
        """All that can be built, warmed up and compared with the resident model."""
        expected = self.folder / "expected.pt"
        with contextlib.ExitStack() as stack:
            systems = {}
            for name in names:
                try:
                    systems[name] = self._start(name, expected, stack)
                except WorkerFailed as error:
                    if name == REFERENCE:
                        raise
                    self.refused[name] = str(error)
                    self.report.note(f"{name} was left out: {error}")
                print(f"{name}: {'refused' if name in self.refused else 'ready'}", file=sys.stderr)
            yield systems

    def _start(self, name: str, expected: Path, stack: contextlib.ExitStack) -> System:
        with contextlib.ExitStack() as begun:
            worker = begun.enter_context(Worker(sys.executable, "offload_system.py"))
            folder = self.folder / name
            folder.mkdir()
            worker.ask(system=name, device=self.device, folder=str(folder), size=asdict(self.size))
            system = System(name, worker, self.size)
            for _ in range(_WARM_UP_TURNS):
                worker.ask()
            system.compare(expected)
            stack.push(begun.pop_all())
            return system

    def fio(self, file: TrialFile, fio: Fio) -> Samples:
        job = Job(file.path, file.nbytes, "read", BLOCK_NBYTES, QUEUE_DEPTH,
                  engine=FIO_ENGINES[file.probe.backend], direct=file.probe.direct)
        return {"forward": fio.run({"read": job})["read"]}


def measure(comparison: Comparison, names: Sequence[str], fio: Fio | None) -> None:
    """All figures, the table and what limits them."""
    report, folder = comparison.report, comparison.folder
    with comparison.started(names) as systems, contextlib.ExitStack() as stack:
        variants: dict[str, Callable[[], Samples]] = {
            name: system.forward for name, system in systems.items()}
        if fio is not None:
            files = stack.enter_context(own_folder(folder))
            nbytes = comparison.size.blocks_nbytes // BLOCK_NBYTES * BLOCK_NBYTES
            file = TrialFile(files, nbytes, probe_folder(files))
            variants[_FIO] = lambda: comparison.fio(file, fio)
        found = report.rounds("forward", variants)
        for system in systems.values():
            system.compare(folder / "expected.pt")
    for name in variants:
        report.figure(f"{name}_s", found.median(name, "forward", wall))
        report.figure(f"{name}_gb_per_s", found.median(name, "forward", speed))
    for system in systems.values():
        tell_system(report, system)
    floor = _FIO if fio is not None else None
    tell_tier(report, found, systems, ours="ours_nvme", floor=floor, names=("nvme_read", "fio"))
    ceiling = PINNED if PINNED in systems else None
    tell_tier(report, found, systems, ours="ours_cpu", floor=ceiling,
              names=("cpu_copy", "pinned_copy"), suffix="_cpu")
    show(comparison, found, systems, floor)


def tell_system(report: Report, system: System) -> None:
    """Peaks, what is in the page cache, and whether the output is right."""
    if system.name == PINNED:
        return
    for name in ("peak", "host_peak"):
        report.figure(f"{system.name}_{name}_mb", system.most(f"{name}_nbytes") / 1e6)
    if system.is_on_disk:
        report.figure(f"{system.name}_cached_mb", system.median("cached_nbytes") / 1e6)
        report.figure(f"{system.name}_read_mb", system.median("read_nbytes") / 1e6)
        left_nbytes = system.most("left_nbytes")
        if left_nbytes > 0.01 * system.size.blocks_nbytes:
            report.note(f"{system.name}: {left_nbytes / 1e6:.0f} MB could not be dropped from the "
                        "page cache before a forward")
    if system.difference:  # NaN too
        report.note(f"{system.name}: the output differs from the resident model's by up to "
                    f"{system.difference}")
    report.runs.append({"section": "answers", "variant": system.name,
                        "difference": system.difference, "forwards": system.answers})


def tell_tier(
    report: Report, found: Rounds, systems: Mapping[str, System], *, ours: str, floor: str | None,
    names: tuple[str, str], suffix: str = "",
) -> None:
    """`nvme_read_over_fio`, `best_peer_read_over_fio`, `peak_bytes_over_best_peer`, and the same
    of the tier in RAM. The best peer is the fastest."""
    if ours not in systems:
        return
    peers = [name for name, system in systems.items()
             if name not in (REFERENCE, PINNED, ours)
             and system.is_on_disk == systems[ours].is_on_disk]
    read, other = names
    if floor is not None:
        report.figure(f"{read}_over_{other}", found.ratio(ours, floor, "forward"))
        report.figure(f"{other}_s_over_{ours}_s", found.ratio(floor, ours, "forward", wall))
    if not peers:
        report.note(f"no peer ran beside {ours}")
        return
    best = max(peers, key=lambda name: found.median(name, "forward"))
    leanest = min(peers, key=lambda name: systems[name].most("peak_nbytes"))
    report.note(f"the best peer of {ours} is {best}, the leanest {leanest}")
    if floor is not None:
        report.figure(f"best_peer_{read.partition('_')[2]}_over_{other}",
                      found.ratio(best, floor, "forward"))
    report.figure(f"speed_over_best_peer{suffix}", 1 / found.ratio(ours, best, "forward", wall))
    for name, peer in (("best", best), ("leanest", leanest)):
        peaks = [systems[each].most("peak_nbytes") for each in (ours, peer)]
        report.figure(f"peak_bytes_over_{name}_peer{suffix}", peaks[0] / peaks[1])


def show(
    comparison: Comparison, found: Rounds, systems: Mapping[str, System], floor: str | None
) -> None:
    """One row a system."""
    peak = "GPU MB" if comparison.device == "cuda" else "peak MB"
    table = Table(title=f"{comparison.size.blocks_nbytes / 1e9:.2f} GB on {comparison.device}",
                  title_justify="left")
    table.add_column("system", no_wrap=True)
    for column in ("s", "GB/s", "of fio", peak, "cached MB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("output")
    for name in found.samples:
        system = systems.get(name)
        share = f"{found.ratio(name, floor, 'forward'):.2f}" if floor is not None and (
            system is not None and system.is_on_disk) else ""
        row = [name, f"{found.median(name, 'forward', wall):.3f}",
               f"{found.median(name, 'forward'):.2f}", share]
        if system is not None and system.difference is not None:
            cached = f"{system.median('cached_nbytes') / 1e6:.0f}" if system.is_on_disk else ""
            output = "equal" if system.difference == 0 else f"off by {system.difference:.0e}"
            row += [f"{system.most('peak_nbytes') / 1e6:.0f}", cached, output]
        table.add_row(*row)
    for name in comparison.refused:
        table.add_row(name, "", "", "", "", "", "refused")
    Console().print(table)


def peer_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("diffusers", "accelerate", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--systems", nargs="+", choices=[n for n in IMPORTS if n != REFERENCE],
                           help="these, beside the resident model and fio; default: all, with "
                                "--quick those on disk")
    arguments.add_argument("--rounds", type=int, metavar="N", help="7, with --quick 3")
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="seconds and peaks")
    options = arguments.parse_args()
    report = Report(round_count=options.rounds or (3 if options.quick else 7))
    machine = {**facts(options.path), **peer_versions()}
    size = (QUICK if options.quick else SIZES)[options.device]
    default = [name for name in IMPORTS if is_on_disk(name) or not options.quick]
    names = list(dict.fromkeys([REFERENCE, *(options.systems or default)]))
    if options.device == "cuda":
        names.append(PINNED)
    report.figure("blocks_gb", size.blocks_nbytes / 1e9)
    with own_folder(options.path) as folder, huge_pages() as has_huge_pages:
        try:
            fio = Fio(huge_pages=has_huge_pages)
        except FioError as error:
            report.note(f"no floor: {error}")
            fio = None
        measure(Comparison(report, folder, options.device, size), names, fio)
    if options.plot is not None:
        draw(options.plot, report.figures, [*names, _FIO],
             title=f"{size.blocks_nbytes / 1e9:.2f} GB in {size.blocks} blocks on {options.device}")
    report.write(options.json, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
