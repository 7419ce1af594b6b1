"""How much of the shorter of backward and optimizer step is hidden when they overlap.

    python bench/optimizer_overlap.py --path /mnt/nvme [--device cuda]

A stack of MLP blocks in fp32, each checkpointed, and AdamW. Alone: backward, then `step()`, each
timed. Together: `OverlapSettings()`, from the beginning of backward to the end of `step()`. The
batch is chosen so that backward takes about as long as the step. Hidden = (backward + step -
together) / the shorter, the median over rounds that take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import facts
from mlp import BLOCK_PARAMETERS, HIDDEN, block_count
from report import Report, parser
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvmeswap import OverlapSettings, SwappedOptimizer
from nvmeswap.cli.bench.folder import own_folder

_LARGEST_BATCH = 1 << 18


class Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, device=device)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, device=device)
        self.norm = nn.LayerNorm(HIDDEN, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Trial:
    """A model and its optimizer."""

    def __init__(
        self, blocks: int, device: str, folder: Path, buffer_count: int, *, overlap: bool
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block(device) for _ in range(blocks)])
        self.device = device
        self.optimizer = SwappedOptimizer(
            torch.optim.AdamW, self.model.parameters(), lr=1e-4, nvme_path=folder,
            buffer_count=buffer_count, overlap=OverlapSettings() if overlap else None,
        )

    def loss(self, batch: int) -> torch.Tensor:
        x = torch.randn(batch, HIDDEN, device=self.device)
        for block in self.model:
            x = checkpoint(block, x, use_reentrant=False)
        loss: torch.Tensor = x.square().mean()
        self._synchronise()
        return loss

    def backward_s(self, batch: int) -> float:
        loss = self.loss(batch)
        return self._timed(lambda: loss.backward())

    def step_s(self) -> float:
        taken = self._timed(self.optimizer.step)
        self.optimizer.zero_grad()
        return taken

    def together_s(self, batch: int) -> float:
        loss = self.loss(batch)

        def both() -> None:
            loss.backward()
            self.optimizer.step()

        taken = self._timed(both)
        self.optimizer.zero_grad()
        return taken

    def _timed(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - began

    def _synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def like_sized_batch(alone: Trial) -> int:
    """A batch whose backward takes about as long as a step."""
    batch = 64
    alone.backward_s(batch)
    alone.step_s()
    for _ in range(8):
        backward_s = alone.backward_s(batch)
        step_s = alone.step_s()
        if 0.8 < backward_s / step_s < 1.25:
            break
        batch = min(_LARGEST_BATCH, max(8, round(batch * min(8.0, step_s / backward_s))))
    return batch


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--parameters", type=float, default=268e6)
    arguments.add_argument("--buffer-count", type=int, default=8,
                           help="sub-groups in memory; all gradients of a block come at once")
    options = arguments.parse_args()
    blocks = block_count(8 * BLOCK_PARAMETERS // 4 if options.quick else options.parameters)
    report = Report(3 if options.quick else 5)
    runs: list[dict[str, float]] = []
    with own_folder(options.path) as folder:
        made = (blocks, options.device, folder, options.buffer_count)
        alone, together = Trial(*made, overlap=False), Trial(*made, overlap=True)
        batch = like_sized_batch(alone)
        together.together_s(batch)
        for _ in range(report.round_count):
            backward_s, step_s = alone.backward_s(batch), alone.step_s()
            both_s = together.together_s(batch)
            hidden = (backward_s + step_s - both_s) / min(backward_s, step_s)
            runs.append({"backward_s": backward_s, "step_s": step_s, "together_s": both_s,
                         "hidden": hidden, "batch": batch})
            print(f"backward {backward_s:.2f} s, step {step_s:.2f} s, together {both_s:.2f} s",
                  file=sys.stderr)
        alone.optimizer.close()
        together.optimizer.close()
    for name in ("backward_s", "step_s", "together_s", "hidden"):
        report.figure(f"overlap_{name}", statistics.median(run[name] for run in runs))
    report.runs.extend(runs)
    report.write(options.json, facts(options.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
