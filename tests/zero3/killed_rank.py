"""A rank that trains, saves each step and resumes, and may kill itself somewhere on the way.

    python -m tests.zero3.killed_rank FOLDER STEPS [KILL]

STEPS more steps than it resumed from. KILL: phase:step:number, `step` counted from the resumed one,
`number` which block, file or share of time. It writes `resumed.<rank>` and a line a step to
`losses.<rank>`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nvmeswap.zero3
from tests.zero3.cases import Case, build
from tests.zero3.checkpoint_ranks import train

PHASES = ("forward", "backward", "step", "writing", "before marker", "before rename", "after")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_model(model: Any, phase: str, number: int) -> None:
    block = model.blocks[number % len(model.blocks)]
    if phase == "forward":
        block.register_forward_pre_hook(lambda *_: die())
    else:

        def die_in_its_backward(module: Any, args: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda _: die())

        block.register_forward_hook(die_in_its_backward)


def die_in_step(optimizer: Any, number: int, step_s: float) -> None:
    step = optimizer.step

    def killed_step() -> None:
        threading.Timer(step_s * (number % 10) / 10, die).start()
        step()
        time.sleep(5)

    optimizer.step = killed_step


def die_in_save(phase: str, number: int) -> None:
    """By what the save asks of the system."""
    fsync, rename = os.fsync, os.rename
    count = 0

    def killed_fsync(fd: int) -> None:
        nonlocal count
        name = os.readlink(f"/proc/self/fd/{fd}")
        if phase == "writing" and name.endswith(".distcp"):
            count += 1
            if count > number % 4:
                die()
        if phase == "before marker" and ("metadata" in name or (
            dist.get_rank() and name.endswith(".partial")
        )):
            die()
        if phase == "before rename" and name.endswith("complete.json"):
            die()
        fsync(fd)

    def killed_rename(old: Any, new: Any, **options: Any) -> None:
        rename(old, new, **options)
        # "step-...": it is complete; ".step-...": an older one is about to be removed.
        if phase == "after" and Path(new).name.startswith(".step-" if number % 2 else "step-"):
            die()

    os.fsync, os.rename = killed_fsync, killed_rename


def arm(kill: tuple[str, int, int], model: Any, optimizer: Any, step_s: float) -> None:
    phase, _, number = kill
    if phase in ("forward", "backward"):
        die_in_the_model(model, phase, number)
    elif phase == "step":
        die_in_step(optimizer, number, step_s)
    else:
        die_in_save(phase, number)


def main(folder: Path, steps: int, kill: tuple[str, int, int] | None) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / "nvme").mkdir(exist_ok=True)
    case = Case(bf16=True)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(folder / "nvme"))
    resumed = nvmeswap.zero3.load(model, optimizer, folder / "checkpoints", missing_ok=True)
    (folder / f"resumed.{rank}").write_text(str(resumed.step))
    assert resumed.extra == (None if resumed.step == 0 else {"at": resumed.step, "rank": rank})
    step_s = 0.05
    with (folder / f"losses.{rank}").open("a", buffering=1) as losses:
        for step in range(resumed.step, resumed.step + steps):
            if kill is not None and step == resumed.step + kill[1]:
                arm(kill, model, optimizer, step_s)
            began = time.perf_counter()
            (loss,) = train(model, optimizer, step, 1)
            step_s = (time.perf_counter() - began) / 3
            losses.write(json.dumps([step, loss]) + "\n")
            nvmeswap.zero3.save(
                model, optimizer, folder / "checkpoints", step=step + 1,
                extra={"at": step + 1, "rank": rank}, keep=1,
            )
            if kill is not None and kill[0] == "after" and step == resumed.step + kill[1]:
                die()
    optimizer.close()
    dist.barrier()
    os._exit(0)


def parse(text: str) -> tuple[str, int, int]:
    phase, step, number = text.split(":")
    assert phase in PHASES
    return phase, int(step), int(number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), parse(sys.argv[3]) if sys.argv[3:] else None)
