"""A sharded model's parameters and buffers by the names that checkpoints know them by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.weights import plain_name
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.tensor import SwappedTensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, under the first of its names. `shape` is that of this rank's part, which begins
    at `offsets` of the whole."""

    name: str
    tensor: DTensor
    shape: torch.Size
    offsets: torch.Size

    @property
    def global_shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """What the parameter says, whatever is stored."""
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Of this rank's part."""
        return self.shape.numel()

    def read(self, start: int, stop: int) -> Tensor:
        """These elements as they are stored, flat, on the host; waits for the disk."""
        local = fsdp.local_tensor(self.tensor)
        if isinstance(local, SwappedTensor):
            values: Tensor = local.handle.source.read_part(local.handle.key, start, stop)
            return values
        return local.detach().view(-1)[start:stop].to("cpu")

    def is_stored_in(self, dtype: torch.dtype) -> bool:
        """Whether `read` gives values of this dtype; reads nothing."""
        local = fsdp.local_tensor(self.tensor)
        if isinstance(local, SwappedTensor):
            return local.handle.source.stored_dtype(local.handle.key) is dtype
        return local.dtype is dtype

    def exact(self) -> Tensor:
        """All of this rank's part as the parameter's dtype has it, rounded once; waits for the
        disk."""
        local = fsdp.local_tensor(self.tensor)
        return local.read() if isinstance(local, SwappedTensor) else local.detach()

    def write(self, start: int, values: Tensor) -> None:
        """Replace elements of a shard that is not trained, or stays in memory."""
        local = fsdp.local_tensor(self.tensor)
        if isinstance(local, SwappedTensor):
            local.handle.source.write_part(local.handle.key, start, values)
        else:
            local.detach().view(-1)[start : start + values.numel()].copy_(values)


def parameters_of(model: nn.Module) -> Iterator[Parameter]:
    """Each parameter once. Raises SwapUsageError for one that is not sharded."""
    for name, tensor in model.named_parameters():
        if not isinstance(tensor, DTensor):
            raise SwapUsageError(
                f"{name} is not sharded", fix="give the model that nvmeswap.zero3.shard returned"
            )
        (chunk,) = cast(Any, tensor).__create_chunk_list__()  # what DCP itself asks
        yield Parameter(plain_name(name), tensor, chunk.sizes, chunk.offsets)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters, and the first ones."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(tensor), plain_name(name))
        if owner != plain_name(name):
            tied[plain_name(name)] = owner
    return tied


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that state_dict() has."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer
