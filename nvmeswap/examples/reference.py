"""The run in RAM that a swapped run must equal, bit for bit: PyTorch's own parts, none of ours."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import AdamW


def shard_in_ram(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    bf16: bool,
    learning_rate: float,
    weight_decay: float,
) -> tuple[nn.Module, AdamW]:
    """FSDP2 with a group for each block and one for the rest, and torch's fused AdamW.

    The update runs on the CPU, as a swapped run's does: on a GPU mesh FSDP2's own CPU offload
    keeps the shards there.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
    )
    on_cpu = mesh.device_type == "cpu"
    offload: OffloadPolicy = OffloadPolicy() if on_cpu else CPUOffloadPolicy()
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True)
    return model, optimizer
