"""Which way to offload a model: the first that fits, from the fastest down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nvmeswap.memory.budget import available_host_memory
from nvmeswap.offload.refusals import as_device, shares_memory
from nvmeswap.offload.units import cut_into_units, members_of

# Arbitrary: what activations, kernels and fragments are left.
_FOR_WEIGHTS = 0.8


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do with one model. `arguments`: of `OffloadManager`, None to leave the model on the
    device. `reason`, in a sentence. `device_nbytes`: of weights on the device at a time, about."""

    arguments: Mapping[str, Any] | None
    reason: str
    device_nbytes: int


def recommend(
    model: nn.Module,
    device: str | torch.device = "cuda",
    *,
    path: str | Path | None = None,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    unified_memory: bool | Literal["auto"] = "auto",
) -> Recommendation:
    """How to offload a model: not at all, by blocks in host memory, by blocks on NVMe, or by leaf
    modules there.

    `device_nbytes` and `host_nbytes`: what there is for weights (None: what is free now). On a
    device that shares its memory with the host (`unified_memory`; "auto" asks it), copies there
    gain nothing: it is NVMe or nothing.
    Does not block, and moves nothing.
    """
    device = as_device(device)
    room = _device_room(device) if device_nbytes is None else device_nbytes
    host_room = available_host_memory().available_nbytes if host_nbytes is None else host_nbytes
    total = _nbytes(model)
    if total <= room * _FOR_WEIGHTS:
        return Recommendation(None, "the model fits on the device", total)
    block = 2 * _largest(model, of_blocks=True)
    leaf = 2 * _largest(model, of_blocks=False)
    granularity, window = ("block", block) if block <= room * _FOR_WEIGHTS else ("leaf", leaf)
    keep = max(0, int(room * _FOR_WEIGHTS) - window)
    arguments = {"granularity": granularity, "keep_resident_bytes": keep}
    if total <= host_room * _FOR_WEIGHTS and not shares_memory(device, unified_memory):
        return Recommendation(
            {"tier": "cpu", **arguments}, "the model fits in host memory", window + keep
        )
    if path is None:
        return Recommendation(
            {"tier": "nvme", **arguments},
            "the model fits in no memory: give a path on a drive", window + keep,
        )
    return Recommendation(
        {"tier": "nvme", "path": path, **arguments}, "the model goes to NVMe", window + keep
    )


def recommend_pipeline(
    components: Mapping[str, nn.Module],
    device: str | torch.device = "cuda",
    *,
    device_count: int = 1,
    path: str | Path | None = None,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    unified_memory: bool | Literal["auto"] = "auto",
) -> dict[str, Recommendation]:
    """The same for the parts of a pipeline, by name: one after the other is offloaded, until what
    stays on the device fits.

    The order is that of FastVideo's guide. On one device the denoiser is first (called many times,
    so that its copies hide behind its computation), then image encoders and autoencoders, then text
    encoders. With several devices the denoiser is sharded over them and offloaded last.
    """
    device = as_device(device)
    room = _device_room(device) if device_nbytes is None else device_nbytes
    host_room = available_host_memory().available_nbytes if host_nbytes is None else host_nbytes
    sizes = {name: _nbytes(model) for name, model in components.items()}
    if device_count > 1:
        sizes = {
            name: size // device_count if _rung(name) == 0 else size for name, size in sizes.items()
        }
    order = sorted(sizes, key=lambda name: (_rung(name), -sizes[name]))
    if device_count > 1:
        order = [n for n in order if _rung(n) != 0] + [n for n in order if _rung(n) == 0]
    staying = sum(sizes.values())
    result: dict[str, Recommendation] = {}
    for name in order:
        if staying <= room * _FOR_WEIGHTS:
            is_sharded = device_count > 1 and _rung(name) == 0
            reason = "shard it with nvmeswap.zero3 or FSDP2: its part fits on each device"
            result[name] = Recommendation(
                None, reason if is_sharded else "it fits beside the others", sizes[name]
            )
            continue
        staying -= sizes[name]
        result[name] = recommend(
            components[name], device, path=path, host_nbytes=host_room,
            unified_memory=unified_memory,
            device_nbytes=max(0, min(room - staying, sizes[name])),
        )
        if (result[name].arguments or {}).get("tier") == "cpu":
            host_room -= sizes[name]
    return {name: result[name] for name in components}


def _rung(name: str) -> int:
    """Where on the ladder a component of this name is."""
    if any(word in name for word in ("transformer", "dit", "unet", "denois")):
        return 0
    return 2 if "text" in name else 1


def _device_room(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_memory().available_nbytes


def _nbytes(model: nn.Module) -> int:
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def _largest(model: nn.Module, *, of_blocks: bool) -> int:
    """Bytes of the largest unit."""
    cuts = cut_into_units(model, members_of(model), "block" if of_blocks else "leaf")
    return max((sum(m.tensor.nbytes for m in cut.members) for cut in cuts), default=0)
