"""Offloaded parameters as the optimizer sees them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from nvmeswap.errors import SwapClosedError, SwapPathError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.offload.block import Block, ManagedTensor
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.home import ResidentHome
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, StateItem


class OffloadedHome(ResidentHome):
    """`nvmeswap.swap.home.ParameterHome` over a managed model's parameters.

    Those in memory are what they are for any optimizer. The values of one on NVMe go to its home by
    direct writes; one of bf16 is the upper half of its master there, and is read for the update.
    `trained`: those of them that were, when the model was offloaded; `homes` is alive as long as
    they are open.
    """

    def __init__(
        self,
        managed: Iterable[tuple[Block, ManagedTensor]],
        trained: Container[ManagedTensor],
        homes: weakref.finalize[..., Any],
    ) -> None:
        super().__init__()
        self._on_nvme = {
            each.tensor: (block, each) for block, each in managed if not block.home.is_in_memory
        }
        self._trained = trained
        self._homes = homes

    def item(
        self, parameter: torch.Tensor, states: Sequence[str], state_dtype: torch.dtype
    ) -> StateItem:
        if parameter not in self._on_nvme:
            return super().item(parameter, states, state_dtype)
        self._check(parameter, self._on_nvme[parameter][1])
        item = super().item(parameter, states, state_dtype)
        dtype = parameter.dtype
        form = MasterForm.SPLIT if dtype is torch.bfloat16 else MasterForm.WHOLE
        output = None if dtype is STATE_DTYPE else dtype
        return StateItem(item.key, item.numel, form, tuple(states), state_dtype, output)

    def _check(self, parameter: torch.Tensor, managed: ManagedTensor) -> None:
        place, name = managed.place, managed.member.name
        if managed not in self._trained:
            raise SwapUsageError(
                f"{name} is on NVMe and was frozen when the model was offloaded",
                fix="requires_grad_() before the model is offloaded; or leave it out",
            )
        if place.stride != torch.empty(place.shape, device="meta").stride():
            raise SwapUsageError(
                f"{name} is not contiguous ({tuple(parameter.shape)}, stride {place.stride})",
                fix="make it contiguous before the model is offloaded",
            )

    def before_step(self) -> None:
        if not self._homes.alive and not self._on_nvme.keys().isdisjoint(self._keys):
            raise SwapClosedError(
                "the manager of this optimizer's parameters is closed: they are not on NVMe now",
                fix="close() the optimizer before its manager, and make a new one",
            )

    def in_place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return None if parameter in self._on_nvme else super().in_place(parameter)

    def edited_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if parameter in self._on_nvme and self._versions.get(parameter) == parameter._version:
            return None  # a mapped one is read only if it was written to
        return super().edited_values(parameter)

    def fetch(
        self, parameter: torch.Tensor, start: int, out: torch.Tensor, lane: Lane
    ) -> list[StoreRequest]:
        block, managed = self._on_nvme[parameter]
        begin = managed.place.begin_bytes + start * out.itemsize
        return block.home.read(begin, out.view(torch.uint8))

    def publish(
        self, parameter: torch.Tensor, start: int, values: torch.Tensor
    ) -> list[StoreRequest]:
        if parameter not in self._on_nvme:
            return super().publish(parameter, start, values)
        block, managed = self._on_nvme[parameter]
        values = values.to(parameter.dtype).contiguous()
        begin = managed.place.begin_bytes + start * values.itemsize
        return block.home.write(begin, values.view(torch.uint8))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise SwapPathError or SwapUsageError for those of a `SwappedOptimizer` that can't be."""
    if options["nvme_path"] is None:
        raise SwapPathError(
            "the optimizer's states go to NVMe, and the manager has no path", key="nvme_path",
            fix="name an existing folder on the drive: manager.optimizer(..., nvme_path=...)",
        )
    if options.get("overlap") is not None:
        raise SwapUsageError(
            "a step in backward would update parameters while they are on the device",
            fix="leave out overlap",
        )
