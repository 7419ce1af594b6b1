"""One AdamW step with its state on the drive: ours, DeepSpeed's pipelined swapper, and the floor.

    python bench/vs_deepspeed_optimizer.py --path /mnt/nvme --deepspeed-python venv/bin/python

The floor is the larger of our update over state in RAM and fio moving as many bytes as our step
moved, in the better of two ways. DeepSpeed needs what vs_deepspeed_io.py says; without it the
figures beside it are left out. Its best settings are searched for first, which takes minutes;
`--deepspeed-settings FILE` keeps them for the next run.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_search import (
    AXES,
    START,
    WARM_UP_STEPS,
    Settings,
    deepspeed,
    optimizer_attempt,
    search,
    search_once,
    tell,
)
from fio import Fio, FioError, huge_pages
from machine import facts
from mlp import BLOCK_PARAMETERS, block_count
from optimizer_floor import BytesAlone, Floor, UpdateAlone, floor_s
from report import Report, Rounds, Samples, parser, wall
from worker import Worker, WorkerFailed

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

# Room for the sub-groups on their way, in a budget that is to hold more than these.
_IN_FLIGHT_NBYTES = 160 << 20
# Of DeepSpeed's peak: half, with room for what differs between runs.
_SHARE_OF_PEAK = 0.47


@dataclass
class Stepper:
    """A worker, as a variant of a round. `answers`: of the measured steps."""

    worker: Worker
    answers: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Samples:
        answer = self.worker.ask()
        self.answers.append(answer)
        nbytes = answer["read_nbytes"] + answer["write_nbytes"]
        return {"step": Usage(nbytes, answer["wall_s"], answer["cpu_s"])}

    def median(self, name: str) -> float:
        return statistics.median(answer[name] for answer in self.answers)

    @property
    def peak_nbytes(self) -> int:
        return max(answer["peak_nbytes"] for answer in self.answers)


@dataclass
class Place:
    """Where a comparison runs, and of what size."""

    report: Report
    folder: Path
    blocks: int

    @contextlib.contextmanager
    def ours(self, host_memory_nbytes: int | None = None) -> Iterator[tuple[Stepper, int]]:
        """Warmed up, and what its process held before it had an optimizer."""
        with own_folder(self.folder) as files, Worker(sys.executable, "our_step.py") as worker:
            held_nbytes = worker.ask(blocks=self.blocks)["resident_nbytes"]
            worker.ask(folder=str(files), host_memory_nbytes=host_memory_nbytes)
            for _ in range(WARM_UP_STEPS):
                worker.ask()
            yield Stepper(worker), held_nbytes

    @contextlib.contextmanager
    def theirs(self, python: str, settings: Settings) -> Iterator[Stepper]:
        with deepspeed(python, self.folder, self.blocks, settings) as worker:
            yield Stepper(worker)

    def figures_of(self, name: str, stepper: Stepper, *names: str) -> None:
        """Medians of what a step took, and the peak of memory."""
        for each in ("wall_s", *names):
            self.report.figure(f"{name}_{each.replace('wall_s', 'step_s')}", stepper.median(each))
        self.report.figure(f"{name}_peak_gb", stepper.peak_nbytes / 1e9)
        self.report.figure(f"{name}_build_peak_gb", stepper.median("build_peak_nbytes") / 1e9)


_OUR_PHASES = ("stall_s", "update_s", "read_nbytes", "write_nbytes", "hit_count")


def measure_step(
    place: Place, fio: Fio | None, python: str, settings: Settings | None
) -> tuple[int, int, int | None]:
    """`achieved_over_floor`, `speed_over_deepspeed`, `rss_over_deepspeed`, and what they are made
    of. Returns bytes: what ours held without an optimizer, wrote, and DeepSpeed's peak."""
    with contextlib.ExitStack() as stack:
        ours, held_nbytes = stack.enter_context(place.ours())
        warm = ours.run()["step"]
        moved = ours.answers.pop()
        bytes_alone = None
        if fio is not None:
            files = stack.enter_context(own_folder(place.folder))
            bytes_alone = BytesAlone(fio, files, read_nbytes=moved["read_nbytes"],
                                     write_nbytes=moved["write_nbytes"])
        update = UpdateAlone(place.blocks * BLOCK_PARAMETERS, place.folder)
        stack.callback(update.close)
        floor = Floor(update, bytes_alone)
        variants: dict[str, Callable[[], Samples]] = {"floor": floor.run, "ours": ours.run}
        theirs = None
        if settings is not None:
            theirs = stack.enter_context(place.theirs(python, settings))
            variants["deepspeed"] = theirs.run
        print(f"first: {warm.wall_s:.2f} s a step", file=sys.stderr)
        found = place.report.rounds("step", variants)
        _floor_figures(place.report, found, has_bytes=bytes_alone is not None)
        place.figures_of("ours", ours, *_OUR_PHASES)
        if theirs is None:
            return held_nbytes, moved["write_nbytes"], None
        place.figures_of("deepspeed", theirs, "read_nbytes", "write_nbytes")
        speed_over = 1 / found.ratio("ours", "deepspeed", "step", wall)
        place.report.figure("speed_over_deepspeed", speed_over)
        place.report.figure("rss_over_deepspeed", ours.peak_nbytes / theirs.peak_nbytes)
        return held_nbytes, moved["write_nbytes"], theirs.peak_nbytes


def _floor_figures(report: Report, found: Rounds, *, has_bytes: bool) -> None:
    names = ["update", *(("at_once", "in_turn") if has_bytes else ())]
    for name in names:
        report.figure(f"floor_{name}_s", found.median("floor", name, wall))
    if not has_bytes:
        report.note("fio is missing: no floor")
        return
    parts = (found.values("floor", name, wall) for name in names)
    floors_s = [floor_s(*each) for each in zip(*parts, strict=True)]
    ours_s = found.values("ours", "step", wall)
    report.figure("floor_s", statistics.median(floors_s))
    report.figure("achieved_over_floor", statistics.median(
        floor / ours for floor, ours in zip(floors_s, ours_s, strict=True)))


def measure_half(
    place: Place, python: str, settings: Settings, *, held_nbytes: int, peak_nbytes: int
) -> None:
    """`speed_over_deepspeed_half` and `rss_over_deepspeed_half`: a budget with which our process
    takes half of DeepSpeed's peak, and caches more."""
    budget_nbytes = round(_SHARE_OF_PEAK * peak_nbytes) - held_nbytes
    if budget_nbytes < _IN_FLIGHT_NBYTES:
        place.report.note(f"half of DeepSpeed's peak leaves {budget_nbytes / 1e9:.2f} GB beside "
                          "parameters, gradients and torch: no figures with that budget")
        return
    with place.ours(budget_nbytes) as (ours, _), place.theirs(python, settings) as theirs:
        found = place.report.rounds("half", {"ours": ours.run, "deepspeed": theirs.run})
        place.figures_of("half", ours, *_OUR_PHASES)
        speed_over = 1 / found.ratio("ours", "deepspeed", "step", wall)
        place.report.figure("speed_over_deepspeed_half", speed_over)
        place.report.figure("rss_over_deepspeed_half", ours.peak_nbytes / theirs.peak_nbytes)


def measure_cache(place: Place, *, state_nbytes: int) -> None:
    """`reads_with_cache_over_without`: bytes, by counters, with a budget that holds a quarter of
    the state beside what is on its way; and what that brings in time."""
    with place.ours() as (without, _), place.ours(
        state_nbytes // 4 + _IN_FLIGHT_NBYTES
    ) as (cached, _):
        found = place.report.rounds("cache", {"without": without.run, "cached": cached.run})
        place.figures_of("cached", cached, *_OUR_PHASES)
        ratio = cached.median("read_nbytes") / without.median("read_nbytes")
        place.report.figure("reads_with_cache_over_without", ratio)
        place.report.figure("speed_with_cache_over_without",
                            1 / found.ratio("cached", "without", "step", wall))


def find_settings(place: Place, python: str, file: Path | None, *, quick: bool) -> Settings | None:
    """DeepSpeed's best, told with all that was tried; None, and a note, where none runs."""
    try:
        with Worker(python, "deepspeed_step.py"):
            pass
    except WorkerFailed as error:
        place.report.note(f"no DeepSpeed in {python} ({error}): no figures beside it")
        return None
    found = search_once(
        file, lambda: search(START, AXES, optimizer_attempt(
            python, place.folder, place.blocks, steps=1 if quick else 3)))
    tell(found, place.report)
    return found.best


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, metavar="N",
                           help="bf16, about that many; 268e6, with --quick 67e6")
    arguments.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON",
                           help="an interpreter that has DeepSpeed")
    arguments.add_argument("--deepspeed-settings", type=Path, metavar="FILE",
                           help="take its settings from here, or search for them and write them")
    options = arguments.parse_args()
    report = Report(round_count=3 if options.quick else 7)
    machine = facts(options.path)
    blocks = block_count(options.parameters or (67e6 if options.quick else 268e6))
    report.figure("parameters", blocks * BLOCK_PARAMETERS)
    with own_folder(options.path) as folder, huge_pages() as has_huge_pages:
        place = Place(report, folder, blocks)
        fio = _fio(report, has_huge_pages)
        python = options.deepspeed_python
        settings = find_settings(place, python, options.deepspeed_settings, quick=options.quick)
        held_nbytes, state_nbytes, peak_nbytes = measure_step(place, fio, python, settings)
        if settings is not None and peak_nbytes is not None:
            measure_half(place, python, settings, held_nbytes=held_nbytes, peak_nbytes=peak_nbytes)
        measure_cache(place, state_nbytes=state_nbytes)
    report.write(options.json, machine)
    return 0


def _fio(report: Report, has_huge_pages: bool) -> Fio | None:
    try:
        fio = Fio(huge_pages=has_huge_pages)
    except FioError as error:
        report.note(str(error))
        return None
    if not has_huge_pages:
        report.note("fio ran on plain memory: huge pages are root's to reserve")
    return fio


if __name__ == "__main__":
    sys.exit(main())
