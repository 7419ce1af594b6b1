"""The toy of offloaded training: ten residual layers of 4096 x 4096, AdamW on the CPU.

    python bench/offload_toy.py --path /mnt/nvme --device cuda

`x + layer_norm(linear(x))`, fp32, 512 rows. `ours` has everything in RAM between uses
(`trainable="cpu"`) and torch's fused AdamW on the CPU; `resident` has everything on the device.
Steps are interleaved, and so is the update alone: the same optimizer over the same tensors of
ours, while nothing else runs. Losses are compared over the first ten steps. With `--tier nvme` all
is on the drive between uses.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

from machine import facts
from report import Report, Samples, parser, wall
from worker import Worker

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.usage import Usage

_WARM_UP_STEPS = 10  # the first makes the optimizer's state
PHASES = ("forward", "backward", "update")


@dataclass
class Trainer:
    """A worker that trains; `answers` of its measured steps, `losses` of those before."""

    worker: Worker
    steps: int
    losses: list[float]
    answers: list[dict[str, Any]] = field(default_factory=list)

    def train(self) -> Samples:
        """Means over so many steps."""
        answer = self.worker.ask(steps=self.steps)
        self.answers.append(answer)
        return {name: Usage(0, answer[f"{name}_s"], 0.0) for name in ("step", *PHASES)}

    def update(self) -> Samples:
        return {"update": Usage(0, self.worker.ask(update=True)["update_s"], 0.0)}

    def most(self, name: str) -> Any:
        return max(answer[name] for answer in self.answers)


def measure(report: Report, ours: Trainer, resident: Trainer) -> None:
    """`step_ms`, `peak_mb`, `update_alone_ms`, `step_over_update_alone`."""
    found = report.rounds("toy", {"ours": ours.train, "alone": ours.update,
                                  "resident": resident.train})
    for name, trainer in (("ours", ours), ("resident", resident)):
        for phase in ("step", *PHASES):
            report.figure(f"{name}_{phase}_ms", 1e3 * found.median(name, phase, wall))
        report.figure(f"{name}_peak_mb", trainer.most("peak_nbytes") / 1e6)
        report.figure(f"{name}_host_peak_mb", trainer.most("host_peak_nbytes") / 1e6)
        report.runs.append({"section": "losses", "variant": name, "losses": trainer.losses})
    report.figure("update_alone_ms", 1e3 * found.median("alone", "update", wall))
    report.figure("step_over_update_alone",
                  found.ratio_of(("ours", "step"), ("alone", "update"), wall))
    report.figure("peak_over_resident", ours.most("peak_nbytes") / resident.most("peak_nbytes"))
    differences = [abs(one - other) / abs(other)
                   for one, other in zip(ours.losses, resident.losses, strict=True)]
    report.figure("largest_loss_difference", max(differences))


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--tier", choices=["cpu", "nvme"], default="cpu")
    arguments.add_argument("--layers", type=int, default=10, metavar="N")
    arguments.add_argument("--hidden", type=int, metavar="N", help="4096, with --quick 1024")
    options = arguments.parse_args()
    report = Report(round_count=3 if options.quick else 7)
    machine = facts(options.path)
    size = {"layers": options.layers, "hidden": options.hidden or (1024 if options.quick else 4096),
            "device": options.device}
    with own_folder(options.path) as folder:
        def trainer(tier: str | None, stack: contextlib.ExitStack) -> Trainer:
            worker = stack.enter_context(Worker(sys.executable, "offload_toy_trainer.py"))
            worker.ask(**size, tier=tier, folder=str(folder))
            losses = worker.ask(steps=_WARM_UP_STEPS)["losses"]
            return Trainer(worker, 3 if options.quick else 10, losses)

        with contextlib.ExitStack() as stack:
            measure(report, trainer(options.tier, stack), trainer(None, stack))
    report.write(options.json, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
