"""A user's script: DeepSpeed's ZeRO-3 from NVMe, that knows nothing of ours. A line a step.

    python bench/deepspeed_script.py DIR

Settings are of the environment: OBC and PBC (optimizer and parameter buffer_count), QD, PAR, SG
(sub_group_size), MIC (max_in_cpu), OFF (nvme or cpu), L (blocks), STEPS.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import deepspeed
import torch
from deepspeed_zero3 import build
from zero3_answers import train_once
from zero3_model import make_batch


def settings() -> dict[str, Any]:
    named = {
        "optimizer_buffer_count": ("OBC", 5), "parameter_buffer_count": ("PBC", 5),
        "queue_depth": ("QD", 8), "intra_op_parallelism": ("PAR", 1),
        "sub_group_size": ("SG", 30_000_000), "max_in_cpu": ("MIC", 10_000_000),
    }
    found = {key: _number(name, default) for key, (name, default) in named.items()}
    return {**found, "block_size": 1 << 20, "pin_memory": False}


def _number(name: str, default: int) -> int:
    return int(float(os.environ.get(name, default)))


def main() -> None:
    engine = build(deepspeed, torch, sys.argv[1], _number("L", 8), os.environ.get("OFF", "nvme"),
                   settings())
    x, y = make_batch(torch)
    for number in range(_number("STEPS", 5)):
        took = train_once(lambda: engine(x, y), engine.backward, engine.step)
        print("step", number, "loss", repr(took["loss"]), "fwd", took["forward_s"],
              "bwd", took["backward_s"], "step", took["step_s"], "tot", took["wall_s"], flush=True)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("maxrss GB", peak_kib * 1024 / 1e9)


if __name__ == "__main__":
    main()
