"""DeepSpeed's ZeRO-3 with parameters and optimizer offloaded. Runs in an interpreter of its own.

    {"folder": "...", "blocks": 8, "device": "nvme", "settings": {...}}   builds the engine
    {}                                                                    a training step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from answers import answer_requests, forget_peak, memory_nbytes
from deepspeed_step import set_environment
from zero3_answers import train_once
from zero3_model import make_batch, make_model


def configuration(folder: str, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    place = {"device": device, "nvme_path": folder, "pin_memory": settings["pin_memory"]}
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
                **place, "buffer_count": settings["optimizer_buffer_count"],
                "pipeline_read": True, "pipeline_write": True,
            },
            "offload_param": {
                **place, "buffer_count": settings["parameter_buffer_count"],
                "buffer_size": 17_000_000, "max_in_cpu": settings["max_in_cpu"],
            },
        },
        "aio": {"single_submit": False, "overlap_events": True, **aio},
        "steps_per_print": 1_000_000,
    }


def build(
    deepspeed: Any, torch: Any, folder: str, blocks: int, device: str, settings: dict[str, Any],
    trains_on: str = "cpu",
) -> Any:
    config = configuration(folder, device, settings)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_model(torch, blocks, trains_on)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    return engine


def begin() -> Callable[..., dict[str, Any]]:
    set_environment()
    import deepspeed
    import torch

    engine: Any = None
    x, y = make_batch(torch)

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal engine, x, y
        if request:
            rows = {"rows": request.pop("rows")} if "rows" in request else {}
            x, y = make_batch(torch, **rows, device=request.get("trains_on", "cpu"))
            engine = build(deepspeed, torch, **request)
            built = memory_nbytes()["peak_nbytes"]
            forget_peak()
            return {"build_peak_nbytes": built}
        return train_once(lambda: engine(x, y), engine.backward, engine.step)

    return answer


if __name__ == "__main__":
    answer_requests(begin)
