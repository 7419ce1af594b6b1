"""Sharded parameters as the optimizer sees them: flat shards, gradients in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nvmeswap.errors import SwapError
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.gradients import HostGradients
from nvmeswap.swap.home import refuse_odd_dtype
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.sub_group import MASTER, STATE_DTYPE, StateItem
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.entries import Entry


class ShardedHome:
    """`nvmeswap.swap.home.ParameterHome` over FSDP2's shards, swapped or resident.

    A swapped shard's master is kept with its moments, at fp32, and its rounded values go to the
    parameter swapper. A shard that stays on the device is copied there; an fp32 one on the CPU is
    updated in place.
    """

    def __init__(self, model: nn.Module, entries: Sequence[Entry], agreement: Agreement) -> None:
        self.swaps_params = False
        self.params: PartitionedParamSwapper | None = None
        self.gradients = HostGradients()
        self._model = model
        self._agreement = agreement
        self._entries = {id(entry.parameter): entry for entry in entries}

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """FSDP2 has reduced a gradient: add it to the host's, and free the device's."""
        gradient = parameter.grad
        if gradient is not None:
            self.gradients.add(self._entry(parameter).key, fsdp.local_tensor(gradient))
            parameter.grad = None

    def key_of(self, parameter: torch.Tensor) -> str:
        return self._entry(parameter).key

    def item(self, parameter: torch.Tensor, states: Sequence[str]) -> StateItem:
        entry = self._entry(parameter)
        refuse_odd_dtype(entry.parameter.dtype)
        if self._in_place(entry) is not None:
            return StateItem(entry.key, entry.numel, tuple(states), None)
        output = None if entry.store_dtype is STATE_DTYPE else entry.store_dtype
        return StateItem(entry.key, entry.numel, (MASTER, *states), output)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.gradients.get(self._entry(parameter).key)

    def master_in_place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._in_place(self._entry(parameter))

    def _in_place(self, entry: Entry) -> torch.Tensor | None:
        if entry.local is None or self.swaps_params:
            return None
        if entry.local.device.type != "cpu" or entry.local.dtype is not STATE_DTYPE:
            return None
        return entry.local.view(-1)

    def initial_values(self, parameter: torch.Tensor) -> torch.Tensor:
        entry = self._entry(parameter)
        assert entry.local is not None, f"{entry.key} is swapped already"
        return entry.local.view(-1)

    def publish(
        self, parameter: torch.Tensor, start: int, values: torch.Tensor
    ) -> list[StoreRequest]:
        entry = self._entry(parameter)
        if self.params is not None:
            return self.params.update(entry.key, start, values.to(entry.store_dtype))
        assert entry.local is not None
        entry.local.view(-1)[start : start + values.numel()].copy_(values)
        return []

    def state_like(self, parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._entry(parameter).shape)

    def before_step(self) -> None:
        self._agreement.raise_if_any_rank_failed()

    def after_step(self, error: SwapError | None) -> None:
        if error is not None:
            self._agreement.report(error)
        self._agreement.raise_if_any_rank_failed()
        if self.params is not None:
            self.params.end_step()
        fsdp.reshard_all(self._model)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        if set_to_none:
            self.gradients.clear()
        else:
            self.gradients.zero()

    def _entry(self, parameter: torch.Tensor) -> Entry:
        return self._entries[id(parameter)]
