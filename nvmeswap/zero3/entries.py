"""The parameters of a sharded model as nvmeswap sees them: one entry each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.weights import plain_name
from nvmeswap.zero3 import fsdp


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter on this rank.

    `swapped`: it is to live in the swap space; `local` is its part until then, None while that is
    on the meta device. `compute_dtype` is what the all-gather moves. A trained shard is stored in
    it, since its exact values are the optimizer's master; a frozen one has no master and is stored
    as it is, so that reading it gives back what was there. One that is not swapped keeps its own
    dtype.
    """

    key: str
    parameter: nn.Parameter
    record: Any
    local: torch.Tensor | None
    swapped: bool
    shape: torch.Size
    padded_shape: torch.Size
    compute_dtype: torch.dtype
    store_dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of it: nothing is gathered."""
        return fsdp.shard_group(self.record).size() == 1

    @property
    def gathers_itself(self) -> bool:
        """True if this rank has all of it, in host memory: FSDP2 then copies what it is given at
        once, before it asks for the next."""
        return self.record.device.type == "cpu" and self.is_whole

    @property
    def spec(self) -> ShardSpec:
        return ShardSpec(self.key, self.numel, self.store_dtype)


def _refuse_left_out(model: nn.Module, entries: list[Entry]) -> None:
    """Whose gradients FSDP2 would not reduce, and nobody here would use."""
    sharded = {id(entry.parameter) for entry in entries}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise SwapUsageError(
                f"{name} is to be trained, but not sharded (fully_shard's ignored_params)",
                fix="shard it, or set requires_grad_(False) and train it by an optimizer of yours",
            )


def entries_of(model: nn.Module, *, swapped: bool) -> list[Entry]:
    """An entry for each parameter of a model that `fully_shard` was applied to, tied ones once."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    entries = []
    for record in fsdp.fsdp_params(model):
        parameter = record.sharded_param
        local = fsdp.local_tensor(parameter)
        compute_dtype = fsdp.compute_dtype(record)
        entries.append(
            Entry(
                key=names[id(parameter)],
                parameter=parameter,
                record=record,
                local=None if local.device.type == "meta" else local,
                swapped=swapped,
                shape=local.shape,
                padded_shape=record.padded_sharded_param_size,
                compute_dtype=compute_dtype,
                store_dtype=compute_dtype
                if swapped and parameter.requires_grad
                else parameter.dtype,
            )
        )
    _refuse_left_out(model, entries)
    order = {name: place for place, name in enumerate(names.values())}
    return sorted(entries, key=lambda entry: order[entry.key])
