"""What each rank of gpu_two.py does; rank 0 writes found.json.

    gpu_two_ranks.py losses FOLDER DEVICE    losses of a global batch, and equality with RAM
    gpu_two_ranks.py rate FOLDER DEVICE      the drive's rate in optimizer steps, and alone
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_programs import PROGRAMS, Runs, begin, difference
from gpu_raw import RawTraffic
from our_zero3 import configuration
from zero3_answers import train_once
from zero3_model import make_batch, make_model

import nvmeswap.zero3
from tests.zero3 import programs

_EQUAL = ("plain", "bf16", "accumulation", "lora")
_STEPS = 4
_GLOBAL_ROWS = 8


class GlobalBatch(programs.Program):
    """Each rank has its part of the same rows."""

    clips = False
    steps = 5

    def loss(self, model: torch.nn.Module, dice: programs.Dice) -> torch.Tensor:
        rows = torch.randn(_GLOBAL_ROWS, programs.DIM, generator=dice.shared)
        share = _GLOBAL_ROWS // dist.get_world_size()
        begin_row = dist.get_rank() * share
        loss: torch.Tensor = model(rows[begin_row : begin_row + share]).float().square().mean()
        return loss


def losses(folder: Path, device: str) -> dict[str, Any]:
    run = Runs(GlobalBatch, device).swapped(folder)
    summed = torch.tensor(run.losses, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    differences = {}
    if dist.get_world_size() > 1:
        for name in _EQUAL:
            runs = Runs(PROGRAMS[name], device)
            mine = difference(partial(runs.swapped, folder), runs.offloaded)
            of_all: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, mine)
            differences[name] = next((each for each in of_all if each is not None), None)
    return {"losses": (summed / dist.get_world_size()).tolist(), "differences": differences}


def rate(folder: Path, device: str) -> dict[str, Any]:
    """Both ranks at a time: the seconds of the slower one, the bytes of both."""
    tiny = device == "cpu"
    model, optimizer = nvmeswap.zero3.shard(
        make_model(torch, 1 if tiny else 12, device), configuration(str(folder), {}))
    x, y = make_batch(torch, 8 if tiny else 4096, device)
    raw = None
    if dist.get_rank() == 0:
        raw = RawTraffic(folder / "raw", 32 << 20 if tiny else 1 << 30)
    ratios, steps, floors = [], [], []
    for _ in range(_STEPS):
        dist.barrier()
        answer = train_once(lambda: model(x, y), lambda loss: loss.backward(),
                            lambda: _step(optimizer))
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, answer)
        if raw is not None:
            moved = [sum(each[f"step_{way}_nbytes"] for each in of_all)
                     for way in ("read", "write")]
            step_s = max(each["step_s"] for each in of_all)
            floors.append(raw.measure(*moved).floor_s)
            steps.append(step_s)
            ratios.append(floors[-1] / step_s)
    optimizer.close()
    if raw is None:
        return {}
    return {"floor_over_step": statistics.median(ratios[2:]), "ratios": ratios, "step_s":
            statistics.median(steps[2:]), "floor_s": statistics.median(floors[2:])}


def _step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    part, folder, device = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    begin(device)
    found = {"losses": losses, "rate": rate}[part](folder, device)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
