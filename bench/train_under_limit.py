"""Twenty steps of a model whose state is more than twice the memory that its process may take.

    sudo python bench/train_under_limit.py --path /mnt/nvme

The model is built on meta, initialised and written module by module, and trained, in a control
group that kills at its limit. Then the same again without a limit and with room for everything: the
losses must be the same. Needs root, to make the control group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from answers import memory_nbytes
from machine import facts
from report import Report, parser
from zero3_model import fp32_product

from nvmeswap.cli.bench.folder import own_folder

_HIDDEN = 1024
_BLOCK_PARAMETERS = 8 * _HIDDEN * _HIDDEN
_STATE_NBYTES = 14  # a parameter: bf16, and an fp32 master with two moments
_MIB = 1 << 20


def make_model(torch: Any, blocks: int) -> Any:
    """bf16, on meta."""

    product = fp32_product(torch)

    class Linear(torch.nn.Linear):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return product(x, self.weight)

    class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = Linear(_HIDDEN, 4 * _HIDDEN, bias=False)
            self.down = Linear(4 * _HIDDEN, _HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block() for _ in range(blocks)))
    torch.set_default_dtype(torch.float32)
    return model


def train(folder: str, blocks: int, steps: int, *, plenty: bool) -> dict[str, Any]:
    """Losses, seconds a step, and the peak of memory."""
    import torch

    import nvmeswap.zero3

    place = {"device": "nvme", "nvme_path": folder}
    few: dict[str, Any] = {} if plenty else {"buffer_count": 2, "max_in_cpu": 0}
    torch.manual_seed(0)
    model, optimizer = nvmeswap.zero3.shard(
        make_model(torch, blocks),
        {
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {**place, **few},
                "offload_optimizer": {**place, "buffer_count": 20 if plenty else 3},
            },
            "nvmeswap": {"overlap_step": not plenty},
        },
    )
    x = torch.randn(8, _HIDDEN, dtype=torch.bfloat16)
    y = torch.randn(8, _HIDDEN, dtype=torch.bfloat16)
    losses, begin_s = [], time.perf_counter()
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x).float(), y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    step_s = (time.perf_counter() - begin_s) / steps
    optimizer.close()
    return {"losses": losses, "step_s": step_s, **memory_nbytes()}


@contextmanager
def control_group(limit_nbytes: int) -> Iterator[Path]:
    """Whose processes are killed when they take more; the file to which their numbers go."""
    name = f"nvmeswap-bench-{os.getpid()}"
    first = Path("/sys/fs/cgroup/memory")
    folder = (first if first.is_dir() else Path("/sys/fs/cgroup")) / name
    folder.mkdir()
    try:
        limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
        (folder / limit).write_text(str(limit_nbytes))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def in_a_process(procs: Path | None, **arguments: Any) -> dict[str, Any]:
    """`train` in a process of its own, which enters the control group before it imports torch."""

    def enter() -> None:
        if procs is not None:
            procs.write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, __file__, "--train", json.dumps(arguments)],
        stdout=subprocess.PIPE, text=True, preexec_fn=enter,
    )
    if done.returncode:
        raise SystemExit(f"training ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        print(json.dumps(train(**json.loads(sys.argv[2]))))
        return 0
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, metavar="N", help="20, with --quick 3")
    options = arguments.parse_args()
    report = Report(round_count=1)
    blocks, limit_nbytes = (24, 1300 * _MIB) if options.quick else (48, 2000 * _MIB)
    steps = options.steps or (3 if options.quick else 20)
    state_nbytes = blocks * _BLOCK_PARAMETERS * _STATE_NBYTES
    report.figure("parameters", blocks * _BLOCK_PARAMETERS)
    report.figure("state_over_limit", state_nbytes / limit_nbytes)
    with own_folder(options.path) as folder:
        work = {"folder": str(folder), "blocks": blocks, "steps": steps}
        with control_group(limit_nbytes) as procs:
            limited = in_a_process(procs, **work, plenty=False)
        free = in_a_process(None, **work, plenty=True)
    report.figure("limit_mib", limit_nbytes / _MIB)
    report.figure("peak_mib", limited["peak_nbytes"] / _MIB)
    report.figure("unlimited_peak_mib", free["peak_nbytes"] / _MIB)
    report.figure("steps", steps)
    report.figure("step_s", limited["step_s"])
    report.figure("unlimited_step_s", free["step_s"])
    report.figure("losses_are_equal", float(limited["losses"] == free["losses"]))
    report.runs.append({"limited": limited, "unlimited": free})
    report.write(options.json, facts(options.path))
    return 0 if limited["losses"] == free["losses"] else 1


if __name__ == "__main__":
    sys.exit(main())
