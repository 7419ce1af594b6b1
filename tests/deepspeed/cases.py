"""Which scripts run with which JSON. No import of DeepSpeed: it takes seconds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A matrix in fp32 is more than 1 MiB on each of two ranks, so that it is swapped, and its elements
# are odd in number, so that the last rank's part is padded.
SIDE = 725
ROWS = 3

Json = dict[str, Any]
BASE: Json = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1,
        "stage3_param_persistence_threshold": 10_000,
        "stage3_prefetch_bucket_size": 1_000_000,
        "offload_param": {"device": "nvme", "buffer_count": 5, "buffer_size": 1_000_000,
                          "max_in_cpu": 0, "pin_memory": False},
        "offload_optimizer": {"device": "nvme", "buffer_count": 5, "pin_memory": False},
    },
    "aio": {"queue_depth": 8},
    "steps_per_print": 1_000_000,
}


@dataclass(frozen=True)
class Case:
    """A script of `programs`, how its JSON differs from `BASE`, on how many ranks."""

    script: str
    changes: Json = field(default_factory=dict)
    ranks: tuple[int, ...] = (2,)
    reference: str = ""  # the script that it is compared with; empty is itself

    @property
    def in_ram(self) -> Case:
        """The same with the defaults for what has no meaning in RAM."""
        changes = copy.deepcopy(self.changes)
        changes.pop("aio", None)
        for name in ("offload_param", "offload_optimizer"):
            changes.get("zero_optimization", {}).pop(name, None)
        return Case(self.reference or self.script, changes)

    def json(self, nvme_path: Path | None) -> Json:
        """With `nvme_path`, or with DeepSpeed's CPU offload in its place."""
        whole = merged(BASE, self.changes)
        for name in ("offload_param", "offload_optimizer"):
            place = whole["zero_optimization"][name]
            if place["device"] == "nvme" and nvme_path is None:
                place["device"] = "cpu"
            elif place["device"] == "nvme":
                place["nvme_path"] = str(nvme_path)
        return whole


def merged(base: Json, changes: Json) -> Json:
    """`base` with `changes`, object by object."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def zero(**changes: Any) -> Json:
    return {"zero_optimization": changes}


def offload(param: Json | None = None, optimizer: Json | None = None) -> Json:
    return zero(offload_param=param or {}, offload_optimizer=optimizer or {})


BOTH = (1, 2)
PIPELINED = {"pipeline_read": True, "pipeline_write": True}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}},
        **zero(reduce_scatter=False)}
BF16 = {"bf16": {"enabled": True}}

CASES = {
    "trains": Case("trains", ranks=BOTH),
    "one sub-group": Case("trains", zero(sub_group_size=1_000_000_000), BOTH),
    "two matrices in a sub-group": Case("trains", zero(sub_group_size=SIDE * SIDE)),
    "buffer_count 1": Case("trains", offload({"buffer_count": 1}, {"buffer_count": 1}), BOTH),
    "buffers smaller than a part": Case("trains", offload({"buffer_size": 1_000})),
    "pipelined": Case("trains", offload(None, PIPELINED), BOTH),
    "pipelined, buffer_count 1": Case(
        "trains", offload({"buffer_count": 1}, {"buffer_count": 1, **PIPELINED})),
    "pipelined reads": Case("trains", offload(None, {"pipeline_read": True})),
    "pipelined writes": Case("trains", offload(None, {"pipeline_write": True})),
    "fast_init": Case("trains", offload(None, {"fast_init": True}), BOTH),
    "parameters go back to RAM": Case("trains", offload({"max_in_cpu": 1_000_000_000})),
    "some parameters go back to RAM": Case("trains", offload({"max_in_cpu": 300_000})),
    "parameters in RAM": Case("trains", offload({"device": "cpu"})),
    "optimizer in RAM": Case("trains", offload(None, {"device": "cpu"})),
    "blocks of 8 MiB": Case("trains", {"aio": {"block_size": 8 << 20}}),
    "no prefetch": Case("trains", zero(stage3_prefetch_bucket_size=0,
                                       stage3_max_live_parameters=0)),
    "clipped": Case("trains", {"gradient_clipping": 1e-3}),
    "engine converts": Case("engine_converts", ranks=BOTH),
    "own optimizer": Case("own_optimizer"),
    "bf16": Case("low_precision", BF16, BOTH),
    "bf16, pipelined, fast_init": Case(
        "low_precision", {**BF16, **offload(None, {**PIPELINED, "fast_init": True})}),
    "gradient accumulation": Case(
        "accumulates", {"gradient_accumulation_steps": 3, "gradient_clipping": 1e-2}, BOTH),
    "gradient accumulation, one sub-group": Case(
        "accumulates", {"gradient_accumulation_steps": 3, "gradient_clipping": 1e-2,
                        **zero(sub_group_size=1_000_000_000)}),
    "frozen base": Case("frozen_base", ranks=BOTH),
    "evaluation between steps": Case("evaluates"),
    "evaluation left by an exception": Case("interrupts_an_evaluation"),
    "experts in another order": Case("reorders_experts"),
    "experts left out": Case("leaves_experts_out", reference="gives_left_experts_zero"),
    "experts left out, one sub-group": Case(
        "leaves_experts_out", zero(sub_group_size=1_000_000_000),
        reference="gives_left_experts_zero"),
    "tied weights": Case("tied_weights"),
    "weights changed between steps": Case("changes_weights"),
    "weights set before the engine": Case("sets_weights_first"),
    "states read and set": Case("reads_and_sets_states", ranks=BOTH),
    "states read and set, pipelined": Case(
        "reads_and_sets_states",
        merged(zero(sub_group_size=SIDE * SIDE), offload(None, PIPELINED))),
    "several engines": Case("several_engines"),
    "two engines at once": Case("two_engines_at_once"),
    "Muon": Case("muon", merged(MUON, zero(save_muon_momentum_buffer_in_memory=False))),
    "Muon, momentum in RAM": Case(
        "muon", merged(MUON, zero(save_muon_momentum_buffer_in_memory=True))),
    "Muon, pipelined": Case("muon", merged(MUON, offload(None, PIPELINED))),
}
