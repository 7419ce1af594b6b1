"""Our ZeRO-3 with parameters and optimizer on NVMe, as vs_deepspeed_zero3.py asks for it.

    {"folder": "...", "blocks": 8, "settings": {...}}   builds it; settings are the JSON's blocks;
                                                        "rows" and "trains_on" may be added
    {}                                                  a forward, a backward, a step
    {"passes": 4}                                       so many of both without a step, the seconds
                                                        of each
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from answers import answer_requests, forget_peak, memory_nbytes
from zero3_answers import time_passes, train_once
from zero3_model import make_batch, make_model


def configuration(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": folder}
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, **settings.get("offload_param", {})},
            "offload_optimizer": {**place, **settings.get("offload_optimizer", {})},
        },
        "nvmeswap": settings.get("nvmeswap", {}),
    }


def begin() -> Callable[..., dict[str, Any]]:
    import torch

    import nvmeswap.zero3

    model: Any = None
    optimizer: Any = None
    x: Any = None
    y: Any = None

    def build(
        folder: str, blocks: int, settings: dict[str, Any], trains_on: str = "cpu",
        **batch: Any,
    ) -> None:
        nonlocal model, optimizer, x, y
        x, y = make_batch(torch, **batch, device=trains_on)
        made = make_model(torch, blocks, trains_on)
        model, optimizer = nvmeswap.zero3.shard(made, configuration(folder, settings))

    def after(loss: Any) -> None:
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def answer(**request: Any) -> dict[str, Any]:
        if "blocks" in request:
            build(**request)
            built = memory_nbytes()["peak_nbytes"]
            forget_peak()
            return {"build_peak_nbytes": built}
        if "passes" in request:
            return time_passes(lambda: model(x, y), after, optimizer.zero_grad, request["passes"])
        if not hasattr(optimizer, "swap"):  # nothing is offloaded
            return train_once(lambda: model(x, y), after, step)
        stats = optimizer.swap.stats()
        found = train_once(lambda: model(x, y), after, step)
        new = optimizer.swap.stats()
        stalls = {
            "parameter_stall_s": new.params.stall_s - stats.params.stall_s,
            "optimizer_stall_s": new.optimizer.stall_s - stats.optimizer.stall_s,
            "update_s": new.optimizer.update_s - stats.optimizer.update_s,
            "parameter_fetch_count": new.params.fetch_count - stats.params.fetch_count,
        }
        state = new.placement.nvme.parameter_nbytes + new.placement.nvme.state_nbytes
        return {**found, **stalls, "arena_nbytes": new.arena_nbytes, "nvme_nbytes": state,
                "arena_locked_nbytes": new.locked_nbytes}

    return answer


if __name__ == "__main__":
    answer_requests(begin)
