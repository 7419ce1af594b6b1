"""What both workers of vs_deepspeed_zero3.py answer: one training step, by phases."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answers import Taken, memory_nbytes

PHASES = ("forward", "backward", "step")


def train_once(
    forward: Callable[[], Any], backward: Callable[[Any], None], step: Callable[[], None]
) -> dict[str, Any]:
    """`wall_s`, `cpu_s` and bytes of all of it, `forward_s` and so on, the loss, memory."""
    taken = Taken()
    loss = forward()
    forward_s = taken.so_far()["wall_s"]
    backward(loss)
    backward_s = taken.so_far()["wall_s"] - forward_s
    step()
    found = taken.so_far()
    return {
        **found, **memory_nbytes(), "locked_nbytes": locked_nbytes(), "loss": loss.item(),
        "forward_s": forward_s, "backward_s": backward_s,
        "step_s": found["wall_s"] - forward_s - backward_s,
    }


def locked_nbytes() -> int:
    """Page-locked memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmLck:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
