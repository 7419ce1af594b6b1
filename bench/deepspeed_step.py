"""DeepSpeed's pipelined optimizer swapper under ZeRO-3. Runs in an interpreter of its own.

    {"folder": "...", "blocks": 8, "settings": {...}}   builds the engine
    {}                                                  a forward, a backward, a measured step

Parameters stay in memory. Only `engine.step()` counts; the gradients, which it writes in backward,
are its own affair.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from answers import Taken, answer_requests, forget_peak, memory_nbytes
from mlp import HIDDEN

# Everything that DeepSpeed's documentation has for this is in `settings`, by these names.
_DEFAULTS = {"block_size": 1 << 20, "single_submit": False, "overlap_events": True}


def configuration(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What deepspeed.initialize gets."""
    aio = {name: settings[name] for name in ("block_size", "queue_depth", "intra_op_parallelism")}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": settings["sub_group_size"],
            "stage3_max_live_parameters": 100_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": folder, "pin_memory": settings["pin_memory"],
                "buffer_count": settings["buffer_count"],
                "pipeline_read": True, "pipeline_write": True,
            },
        },
        "aio": {**_DEFAULTS, **aio},
        "steps_per_print": 1_000_000,
    }


def build(deepspeed: Any, torch: Any, folder: str, blocks: int, settings: dict[str, Any]) -> Any:
    class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
            self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)
            self.norm = torch.nn.LayerNorm(HIDDEN)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    config = configuration(folder, settings)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*(Block() for _ in range(blocks)))
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    return engine


def set_environment() -> None:
    """One rank, without a launcher, on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)


def begin() -> Callable[..., dict[str, Any]]:
    set_environment()
    import deepspeed
    import torch

    engine: Any = None
    build_peak_nbytes = 0

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal engine, build_peak_nbytes
        if request:
            engine = build(deepspeed, torch, **request)
            # What building took at its most must not stand for what a step takes.
            build_peak_nbytes = memory_nbytes()["peak_nbytes"]
            forget_peak()
            return {"parameters": sum(each.ds_numel for each in engine.module.parameters())}
        x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
        loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        taken = Taken()
        engine.step()
        return {**taken.so_far(), **memory_nbytes(), "build_peak_nbytes": build_peak_nbytes,
                "loss": loss.item()}

    return answer


if __name__ == "__main__":
    answer_requests(begin)
