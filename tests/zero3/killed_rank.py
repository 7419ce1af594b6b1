"""A rank that trains, saves each step and resumes, and may kill itself somewhere on the way.

`Kill` is a phase, a step counted from the resumed one, and which block, file or share of time. It
writes `resumed.<rank>`, a line a step to `losses.<rank>`, and why it failed to `error.<rank>`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nvmeswap.zero3
from tests.launch import be_rank
from tests.zero3.cases import Case, build
from tests.zero3.checkpoint_ranks import train

Kill = tuple[str, int, int]
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


def arm(kill: Kill, model: Any, optimizer: Any, step_s: float) -> None:
    phase, _, number = kill
    if phase in ("forward", "backward"):
        die_in_the_model(model, phase, number)
    elif phase == "step":
        die_in_step(optimizer, number, step_s)
    else:
        die_in_save(phase, number)


def run(rank: int, ranks: int, port: int, folder: Path, steps: int, kill: Kill | None) -> None:
    """`steps` more than it resumed from."""
    be_rank(rank, ranks, port)
    try:
        train_and_save(folder, steps, kill)
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def train_and_save(folder: Path, steps: int, kill: Kill | None) -> None:
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
