"""What `nvmeswap plan` predicts, beside what `nvmeswap.zero3.shard` then takes.

    python bench/plan_against_runs.py --path /mnt/nvme

MLP blocks (two linear layers and a norm, as in `mlp.py`) at two hidden sizes, each with parameters
read twice a step (`max_in_cpu` 0) and with all of them kept in memory. A round is two steps, with
the drive, the update and a few blocks in memory measured between them, since a busy machine changes
from one second to the next; it is predicted from what was measured in it. The figure is the median
over rounds of predicted over measured seconds, phase by phase: 1 is perfect, 0.8 to 1.25 is within
twenty per cent. `..._best` is the prediction from the best rates of all rounds, over the shortest
phases: what others do meanwhile weighs least in it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from machine import facts
from report import Report, parser
from torch import nn

import nvmeswap.zero3
from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.plan.compute import ComputeTrial
from nvmeswap.cli.plan.passes import Compute
from nvmeswap.cli.plan.predict import Machine, predict
from nvmeswap.cli.plan.rates import DriveRates, DriveTrial, HostRates, measure_host
from nvmeswap.config import Config
from nvmeswap.zero3.foresight import Foresight

BLOCKS = 8
BATCH = 8
PHASES = ("forward", "backward", "step")
_hidden = 0  # of the model that the functions below make


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_hidden, 4 * _hidden)
        self.down = nn.Linear(4 * _hidden, _hidden)
        self.norm = nn.LayerNorm(_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def model() -> nn.Module:
    return Mlp()


def batch() -> torch.Tensor:
    return torch.randn(BATCH, _hidden)


@dataclass(frozen=True)
class Seconds:
    forward: float
    backward: float
    step: float


_Fields = TypeVar("_Fields", Seconds, Compute)


def _mean(kind: type[_Fields], one: _Fields, other: _Fields) -> _Fields:
    pairs = zip(asdict(one).values(), asdict(other).values(), strict=True)
    return kind(*(statistics.mean(pair) for pair in pairs))


class Run:
    """A model at one size under one budget, swapped."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = nvmeswap.zero3.shard(model(), settings)
        self.x = batch()

    def measure(self) -> Seconds:
        began = time.perf_counter()
        loss = self.model(self.x)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.optimizer.zero_grad()
        return Seconds(forward - began, backward - forward, stepped - backward)

    def close(self) -> None:
        self.optimizer.close()


def config(folder: Path, max_in_cpu: int, bf16: bool) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "max_in_cpu": max_in_cpu},
            "offload_optimizer": nvme,
        },
        "bf16": {"enabled": bf16},
    }


def foresee(settings: Config) -> Foresight:
    with torch.device("meta"):
        made = model()
    return Foresight(made, settings, ranks=1, device="cpu")


def foretell(foresight: Foresight, settings: Config, machine: Machine) -> Seconds:
    found = predict(foresight, settings, machine, micro_batches=1)
    return Seconds(found.passes.forward_s, found.passes.backward_s, found.stepping.step_s)


def rounds(
    foresight: Foresight, raw: dict[str, Any], count: int, folder: Path, size_nbytes: int
) -> Iterator[tuple[Machine, Seconds]]:
    """The rates and the measured seconds, round by round."""
    settings = Config.load(raw)
    layouts = foresight.footprint(settings).layouts
    compute = ComputeTrial("plan_against_runs:model", "plan_against_runs:batch", settings,
                           device="cpu")
    run = Run(raw)
    try:
        with DriveTrial(folder, settings, size_nbytes) as drive:
            for _ in range(2):  # the first steps are others: no plan, no states
                run.measure()
                compute.sample()
            for _ in range(count):
                # Measured and predicted take turns: run, rates, run, so that drifts cancel.
                first, before = run.measure(), compute.sample()
                machine = Machine(drive.sample(), measure_host(layouts, settings, 4),
                                  _mean(Compute, before, compute.sample()))
                yield machine, _mean(Seconds, first, run.measure())
    finally:
        run.close()
        compute.close()


def use(hidden: int) -> None:
    """Models and batches are of this size from now on."""
    global _hidden
    _hidden = hidden


def compare(
    report: Report, name: str, foresight: Foresight, settings: Config,
    found: list[tuple[Machine, Seconds]],
) -> None:
    """Two figures a phase, and two for the whole step."""
    ratios: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "total")}
    for number, (machine, measured) in enumerate(found):
        foreseen, taken = asdict(foretell(foresight, settings, machine)), asdict(measured)
        for phase in PHASES:
            ratios[phase].append(foreseen[phase] / taken[phase])
        ratios["total"].append(sum(foreseen.values()) / sum(taken.values()))
        report.runs.append({"run": name, "round": number, "predicted_s": foreseen,
                            "measured_s": taken, **asdict(machine)})
    for phase, values in ratios.items():
        report.figure(f"{name}_{phase}_predicted_over_measured", statistics.median(values))
    machines = [machine for machine, _ in found]
    quiet = Machine(
        DriveRates(*map(max, zip(*(astuple(each.drives) for each in machines), strict=True))),
        HostRates(*map(max, zip(*(astuple(each.host) for each in machines), strict=True))),
        Compute(*map(min, zip(*(astuple(each.compute) for each in machines), strict=True))),
    )
    foreseen = asdict(foretell(foresight, settings, quiet))
    taken = {phase: min(getattr(each, phase) for _, each in found) for phase in PHASES}
    report.runs.append({"run": name, "round": "best", "predicted_s": foreseen,
                        "measured_s": taken, **asdict(quiet)})
    for phase in PHASES:
        report.figure(f"{name}_{phase}_best", foreseen[phase] / taken[phase])
    report.figure(f"{name}_total_best", sum(foreseen.values()) / sum(taken.values()))


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--hidden", type=int, nargs=2, default=None, metavar="N",
                           help="the two sizes (1024 and 2048; quick: 512 and 1024)")
    arguments.add_argument("--bf16", action="store_true",
                           help="compute in bf16 (slow on processors without instructions for it)")
    options = arguments.parse_args()
    report = Report(3 if options.quick else 7)
    sizes = options.hidden or ([512, 1024] if options.quick else [1024, 2048])
    budgets = {"none": 0, "plenty": 1_000_000_000}
    with own_folder(options.path) as folder:
        foresights = {}
        for hidden in sizes:  # before there is a process group
            use(hidden)
            foresights[hidden] = foresee(Config.load(config(folder, 0, options.bf16)))
        for hidden in sizes:
            use(hidden)
            for name, max_in_cpu in budgets.items():
                raw = config(folder, max_in_cpu, options.bf16)
                found = list(rounds(foresights[hidden], raw, report.round_count, folder,
                                    (128 if options.quick else 512) << 20))
                compare(report, f"h{hidden}_{name}", foresights[hidden], Config.load(raw), found)
    for kind in ("predicted_over_measured", "best"):
        values = [value for name, value in report.figures.items() if name.endswith(kind)]
        report.figure(f"worst_{kind}", max(max(value, 1 / value) for value in values))
    report.write(options.json, facts(options.path))
    return 0


if __name__ == "__main__":
    sys.modules["plan_against_runs"] = sys.modules["__main__"]
    sys.exit(main())
