"""What both workers of vs_deepspeed_zero3.py answer: one training step, by phases."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answers import Taken, memory_nbytes

PHASES = ("forward", "backward", "step")


def train_once(
    forward: Callable[[], Any], backward: Callable[[Any], None], step: Callable[[], None]
) -> dict[str, Any]:
    """`wall_s`, `cpu_s` and bytes of all of it, `forward_s`, `forward_read_nbytes` and so on of
    each phase (what the GPU has queued by then included), the loss, memory."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = Taken()
    phases: dict[str, float] = {}
    before = taken.so_far()

    def finish(phase: str) -> None:
        nonlocal before
        if on_gpu:
            torch.cuda.synchronize()
        now = taken.so_far()
        phases[f"{phase}_s"] = now["wall_s"] - before["wall_s"]
        for way in ("read_nbytes", "write_nbytes"):
            phases[f"{phase}_{way}"] = now[way] - before[way]
        before = now

    loss = forward()
    finish("forward")
    backward(loss)
    finish("backward")
    step()
    finish("step")
    return {
        **before, **memory_nbytes(), **phases, "loss": loss.item(),
        "locked_nbytes": locked_nbytes(), "torch_pinned_nbytes": torch_pinned_nbytes(),
        "gpu_peak_nbytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }


def time_passes(
    forward: Callable[[], Any],
    backward: Callable[[Any], None],
    zero_grad: Callable[[], None],
    count: int,
) -> dict[str, Any]:
    """`forward_s` and `backward_s` of each."""
    import torch

    taken: dict[str, list[float]] = {"forward_s": [], "backward_s": []}

    def finish(phase: str, began: float) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken[f"{phase}_s"].append(time.perf_counter() - began)

    for _ in range(count):
        began = time.perf_counter()
        loss = forward()
        finish("forward", began)
        began = time.perf_counter()
        backward(loss)
        finish("backward", began)
        zero_grad()
    return taken


def locked_nbytes() -> int:
    """Page-locked memory of this process, but for what CUDA has locked."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmLck:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def torch_pinned_nbytes() -> int:
    """What torch's own allocator has page-locked at most."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
