"""One DeepSpeed script, as it is and with `nvmeswap.deepspeed.install()`, in turns.

    python bench/vs_deepspeed_swap.py --path /mnt/nvme              # deepspeed_script.py
    python bench/vs_deepspeed_swap.py --path /mnt/nvme --script FILE
    python bench/vs_deepspeed_swap.py --path /mnt/nvme --defaults   # with too few buffers

Ours is `python -m nvmeswap.deepspeed SCRIPT`. The script gets a folder and settings of the
environment (deepspeed_script.py has their names; those that are set already are kept), and prints
`step 0 loss .. fwd .. bwd .. step .. tot ..` a step and `maxrss GB ..`.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_step import set_environment
from machine import facts
from report import Report, Rounds, Samples, parser, wall
from worker import WorkerFailed, last_words
from zero3_answers import PHASES
from zero3_plot import draw

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

# With these DeepSpeed works; see `DEFAULTS`.
SETTINGS = {"OBC": "16", "PBC": "20", "QD": "32", "PAR": "2"}
DEFAULTS = {"OBC": "5", "PBC": "5"}
_WARM_UP_STEPS = 2  # the first has no states, the second is the first to read them
_TIMEOUT_S = 3600
_STEP = re.compile(r"step \d+ loss (\S+) fwd (\S+) bwd (\S+) step (\S+) tot (\S+)")
_PEAK = re.compile(r"maxrss GB (\S+)")
INSTALLED = ("-m", "nvmeswap.deepspeed")


@dataclass(frozen=True)
class Trained:
    """What one run of the script printed; `seconds` by phase, a value a step."""

    losses: list[float]
    seconds: dict[str, list[float]]
    peak_gb: float


@dataclass
class Script:
    """The script in one variant: `launcher` stands before it. `trained` collects its runs."""

    python: str
    file: Path
    parent: Path
    environment: Mapping[str, str]
    launcher: tuple[str, ...] = ()
    trained: list[Trained] = field(default_factory=list)

    def train(self) -> Trained:
        """Raises WorkerFailed."""
        with own_folder(self.parent) as folder:
            command = [self.python, *self.launcher, str(self.file), str(folder)]
            ended = subprocess.run(command, env={**os.environ, **self.environment}, text=True,
                                   capture_output=True, timeout=_TIMEOUT_S, check=False)
        steps = [tuple(map(float, values)) for values in _STEP.findall(ended.stdout)]
        peak = _PEAK.search(ended.stdout)
        if ended.returncode != 0 or peak is None or not steps:
            raise WorkerFailed(f"after {len(steps)} steps: {last_words(ended.stderr)}")
        losses, *phases = (list(values) for values in zip(*steps, strict=True))
        seconds = dict(zip((*PHASES, "all"), phases, strict=True))
        self.trained.append(Trained(losses, seconds, float(peak[1])))
        return self.trained[-1]

    def turn(self) -> Samples:
        """Medians over the steps of one run."""
        return {name: Usage(0, statistics.median(values[_WARM_UP_STEPS:]), 0.0)
                for name, values in self.train().seconds.items()}


def first_difference(losses: list[float], others: list[float]) -> int | None:
    """The step that differs first."""
    pairs = zip(losses, others, strict=True)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), None)


def tell_losses(report: Report, name: str, runs: Mapping[str, list[float]]) -> None:
    """`name`: 1 when all are equal, bit for bit as far as printed."""
    reference_name, reference = next(iter(runs.items()))
    differing = {}
    for other, losses in runs.items():
        step = first_difference(reference, losses)
        if step is not None:
            differing[other] = step
            report.note(f"{name}: {other} has {losses[step]!r} in step {step}, "
                        f"{reference_name} {reference[step]!r}")
        report.runs.append({"section": "losses", "variant": other, "losses": losses})
    report.figure(name, float(not differing))


def tell_variant(report: Report, found: Rounds, name: str, script: Script) -> None:
    for phase in (*PHASES, "all"):
        report.figure(f"{name}_{phase}_s", found.median(name, phase, wall))
    report.figure(f"{name}_peak_gb", statistics.median(each.peak_gb for each in script.trained))


def measure(report: Report, scripts: Mapping[str, Script], plot: Path | None) -> None:
    """`speed_over_deepspeed`, by phases too, `rss_over_deepspeed`, `losses_equal`."""
    found = report.rounds("swap", {name: script.turn for name, script in scripts.items()})
    for name, script in scripts.items():
        tell_variant(report, found, name, script)
    for phase in PHASES:
        ratio = found.ratio("deepspeed", "installed", phase, wall)
        report.figure(f"{phase}_speed_over_deepspeed", ratio)
    report.figure("speed_over_deepspeed", found.ratio("deepspeed", "installed", "all", wall))
    peaks = [report.figures[f"{name}_peak_gb"] for name in ("installed", "deepspeed")]
    report.figure("rss_over_deepspeed", peaks[0] / peaks[1])
    tell_losses(report, "losses_equal", {
        f"{name}, run {number}": each.losses
        for name, script in scripts.items() for number, each in enumerate(script.trained)
    })
    if plot is not None:
        losses = {name: script.trained[0].losses for name, script in scripts.items()}
        draw(plot, losses, report.figures)


def measure_defaults(report: Report, make: Callable[..., Script]) -> None:
    """Who finishes with DeepSpeed's default buffer counts, and with its offload to the CPU's
    losses (`losses_equal_cpu_offload`)."""
    try:
        make().train()
        report.note(f"DeepSpeed with {DEFAULTS}: finished")
    except WorkerFailed as error:
        report.note(f"DeepSpeed with {DEFAULTS}: stopped {error}")
    ours = make(launcher=INSTALLED).train()
    report.note(f"installed, with {DEFAULTS}: {len(ours.losses)} steps")
    report.figure("installed_defaults_step_s", statistics.median(ours.seconds["all"]))
    report.figure("installed_defaults_peak_gb", ours.peak_gb)
    cpu = make(environment={"OFF": "cpu"}).train()
    tell_losses(report, "losses_equal_cpu_offload",
                {"CPU offload": cpu.losses, "installed": ours.losses})


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--script", type=Path, metavar="FILE",
                           default=Path(__file__).with_name("deepspeed_script.py"))
    arguments.add_argument("--defaults", action="store_true",
                           help="DeepSpeed's default buffer counts: it stops, ours takes 10 steps")
    arguments.add_argument("--rounds", type=int, metavar="N", help="5, with --quick 3")
    arguments.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON",
                           help="an interpreter that has DeepSpeed, and nvmeswap")
    arguments.add_argument("--plot", type=Path, metavar="PNG", help="losses, and seconds a phase")
    options = arguments.parse_args()
    report = Report(round_count=options.rounds or (3 if options.quick else 5))
    machine = facts(options.path)
    set_environment()
    chosen = {**DEFAULTS, "STEPS": "10"} if options.defaults else {**SETTINGS, "STEPS": "6"}
    if options.quick and not options.defaults:
        chosen["STEPS"] = "4"  # with fewer blocks it would stop: "already assigned swap buffer"
    for name, value in chosen.items():
        os.environ.setdefault(name, value)

    def make(launcher: tuple[str, ...] = (),
             environment: Mapping[str, str] | None = None) -> Script:
        return Script(options.deepspeed_python, options.script, options.path, environment or {},
                      launcher)

    if options.defaults:
        measure_defaults(report, make)
    else:
        measure(report, {"deepspeed": make(), "installed": make(INSTALLED)}, options.plot)
    report.write(options.json, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
