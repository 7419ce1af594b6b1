"""Training from NVMe, step by step: ours beside DeepSpeed's ZeRO-3 offload, with one model.

    python bench/vs_deepspeed_zero3.py --path /mnt/nvme --deepspeed-python venv/bin/python

`ours` has a budget with which it takes less than half of DeepSpeed's memory, `overlap` the same and
updates during backward, `default` our defaults. Steps of all are interleaved. DeepSpeed's best
settings are searched for first, which takes minutes; `--deepspeed-settings FILE` keeps them. Its
offload to the CPU is compared in rounds of its own: all at once would not fit 24 GiB.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_search import Settings, search, search_once, tell
from machine import facts
from mlp import BLOCK_PARAMETERS, block_count
from report import Report, Rounds, Samples, parser, wall
from worker import Worker, WorkerFailed
from zero3_answers import PHASES
from zero3_plot import draw

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

_WARM_UP_STEPS = 3  # the first has no states, the second is the first to read them, and ahead
_SHARE_OF_PEAK = 0.47  # half, with room for what differs between runs
_OUR_FIGURES = ("parameter_stall_s", "optimizer_stall_s", "update_s", "arena_nbytes")

START: Settings = {
    "optimizer_buffer_count": 16, "parameter_buffer_count": 20, "sub_group_size": 30_000_000,
    "queue_depth": 32, "block_size": 1 << 20, "intra_op_parallelism": 2, "pin_memory": False,
    "max_in_cpu": 10_000_000,
}
AXES: dict[str, list[Any]] = {
    "max_in_cpu": [1_000_000_000],
    "sub_group_size": [15_000_000, 60_000_000],
    "optimizer_buffer_count": [24],
    "queue_depth": [64],
    "block_size": [4 << 20],
    "intra_op_parallelism": [1],
}
DEFAULT_COUNTS = {"optimizer_buffer_count": 4, "parameter_buffer_count": 5}


@dataclass
class Trainer:
    """A worker, as a variant of a round; `answers` of its steps, `losses` from the first on."""

    worker: Worker
    losses: list[float] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def warm_up(self) -> None:
        for _ in range(_WARM_UP_STEPS):
            self.losses.append(self.worker.ask()["loss"])

    def run(self) -> Samples:
        answer = self.worker.ask()
        self.losses.append(answer["loss"])
        self.answers.append(answer)
        moved = answer["read_nbytes"] + answer["write_nbytes"]
        phases = {name: Usage(0, answer[f"{name}_s"], 0.0) for name in PHASES}
        return {"all": Usage(moved, answer["wall_s"], answer["cpu_s"]), **phases}

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
    python: str  # DeepSpeed's
    trains: Mapping[str, Any] = field(default_factory=dict)  # "trains_on" a GPU, "rows" of a batch
    environment: Mapping[str, str] = field(default_factory=dict)
    deepspeed_timeout_s: float = 900.0

    @contextlib.contextmanager
    def ours(self, settings: Mapping[str, Any]) -> Iterator[Trainer]:
        with own_folder(self.folder) as files, Worker(sys.executable, "our_zero3.py") as worker:
            worker.ask(folder=str(files), blocks=self.blocks, settings=settings, **self.trains)
            yield Trainer(worker)

    @contextlib.contextmanager
    def theirs(self, device: str, settings: Settings) -> Iterator[Trainer]:
        with own_folder(self.folder) as files, Worker(
            self.python, "deepspeed_zero3.py", environment=self.environment,
            timeout_s=self.deepspeed_timeout_s,
        ) as worker:
            worker.ask(folder=str(files), blocks=self.blocks, device=device, settings=settings,
                       **self.trains)
            yield Trainer(worker)

    def attempt(self, settings: Settings) -> list[dict[str, Any]]:
        """Two steps of DeepSpeed's after its first two."""
        with self.theirs("nvme", settings) as trainer:
            return [trainer.worker.ask() for _ in range(4)][2:]

    def figures_of(self, name: str, trainer: Trainer, *names: str) -> None:
        """Medians of what a step took, by phases, and the peak of memory."""
        phases = [f"{phase}_s" for phase in PHASES]
        for each in ("wall_s", *phases, "cpu_s", "read_nbytes", "write_nbytes", "locked_nbytes",
                     *names):
            self.report.figure(f"{name}_{each}", trainer.median(each))
        self.report.figure(f"{name}_peak_gb", trainer.peak_nbytes / 1e9)


def budget_nbytes(place: Place, settings: Settings) -> int:
    """For our swap memory: with it our process takes less than half of DeepSpeed's peak. Looked for
    in a run of each, since what else a process takes is not known before."""
    with place.theirs("nvme", settings) as theirs:
        theirs.warm_up()
        theirs.run()
        allowed_nbytes = round(_SHARE_OF_PEAK * theirs.peak_nbytes)
    with place.ours({}) as ours:
        ours.warm_up()
        ours.run()
        arena_nbytes = int(ours.answers[-1]["arena_nbytes"])
        return arena_nbytes + max(0, allowed_nbytes - ours.peak_nbytes)


def measure_nvme(place: Place, settings: Settings, budget: int) -> dict[str, list[float]]:
    """`speed_over_deepspeed`, `rss_over_deepspeed` and their parts; returns all losses."""
    block = {"host_memory_nbytes": budget}
    with contextlib.ExitStack() as stack:
        trainers = {
            "default": stack.enter_context(place.ours({})),
            "ours": stack.enter_context(place.ours({"nvmeswap": block})),
            "overlap": stack.enter_context(
                place.ours({"nvmeswap": {**block, "overlap_step": True}})),
            "deepspeed": stack.enter_context(place.theirs("nvme", settings)),
        }
        for trainer in trainers.values():
            trainer.warm_up()
        runs: dict[str, Callable[[], Samples]] = {n: each.run for n, each in trainers.items()}
        found = place.report.rounds("nvme", runs)
        for name, trainer in trainers.items():
            place.figures_of(name, trainer, *(() if name == "deepspeed" else _OUR_FIGURES))
        peak_nbytes = trainers["deepspeed"].peak_nbytes
        for name in ("default", "ours", "overlap"):
            suffix = "" if name == "ours" else f"_{name}"
            place.report.figure(f"speed_over_deepspeed{suffix}", _speed(found, name, "deepspeed"))
            share = trainers[name].peak_nbytes / peak_nbytes
            place.report.figure(f"rss_over_deepspeed{suffix}", share)
        return {name: trainer.losses for name, trainer in trainers.items()}


def _speed(found: Rounds, name: str, over: str) -> float:
    return 1 / found.ratio(name, over, "all", wall)


def measure_cpu(place: Place, settings: Settings, budget: int) -> dict[str, list[float]]:
    """`time_over_deepspeed_cpu_offload`: ours from NVMe, with updates during backward."""
    block = {"host_memory_nbytes": budget, "overlap_step": True}
    with place.ours({"nvmeswap": block}) as ours, place.theirs("cpu", settings) as theirs:
        ours.warm_up()
        theirs.warm_up()
        found = place.report.rounds("cpu", {"overlap": ours.run, "deepspeed_cpu": theirs.run})
        place.figures_of("deepspeed_cpu", theirs)
        place.report.figure("time_over_deepspeed_cpu_offload",
                            found.ratio("overlap", "deepspeed_cpu", "all", wall))
        return {"deepspeed_cpu": theirs.losses}


def measure_few_buffers(place: Place, settings: Settings) -> None:
    """Who finishes where DeepSpeed's default buffer counts are too few."""
    theirs = "finished"
    try:
        place.attempt({**settings, **DEFAULT_COUNTS})
    except WorkerFailed as error:
        theirs = f"stopped: {error}"
    place.report.note(f"DeepSpeed with its default buffer counts {DEFAULT_COUNTS}: {theirs}")
    for count in (1, 5):
        counts = {"buffer_count": count, "max_in_cpu": 0}
        with place.ours(
            {"offload_param": counts, "offload_optimizer": {"buffer_count": count}}
        ) as ours:
            ours.warm_up()
            ours.run()
            place.report.figure(f"buffers_{count}_step_s", ours.answers[-1]["wall_s"])
            place.report.note(f"ours with buffer_count {count}: finished")


def find_settings(place: Place, file: Path | None) -> Settings | None:
    """DeepSpeed's best, told with all that was tried; None, and a note, where none runs."""
    try:
        with Worker(place.python, "deepspeed_zero3.py"):
            pass
    except WorkerFailed as error:
        place.report.note(f"no DeepSpeed in {place.python} ({error}): no figures beside it")
        return None
    found = search_once(file, lambda: search(START, AXES, place.attempt))
    tell(found, place.report)
    return found.best


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, metavar="N",
                           help="about that many; 268e6, with --quick 67e6")
    arguments.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON",
                           help="an interpreter that has DeepSpeed")
    arguments.add_argument("--deepspeed-settings", type=Path, metavar="FILE",
                           help="take its settings from here, or search for them and write them")
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="losses, and seconds a phase")
    options = arguments.parse_args()
    report = Report(round_count=3 if options.quick else 5)
    machine = facts(options.path)
    blocks = block_count(options.parameters or (67e6 if options.quick else 268e6))
    report.figure("parameters", blocks * BLOCK_PARAMETERS)
    with own_folder(options.path) as folder:
        place = Place(report, folder, blocks, options.deepspeed_python)
        settings = find_settings(place, options.deepspeed_settings)
        if settings is not None:
            budget = budget_nbytes(place, settings)
            losses = measure_nvme(place, settings, budget)
            losses.update(measure_cpu(place, settings, budget))
            measure_few_buffers(place, settings)
            report.runs.extend({"section": "losses", "variant": n, "losses": each}
                               for n, each in losses.items())
            if options.plot is not None:
                draw(options.plot, losses, report.figures)
    report.write(options.json, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
