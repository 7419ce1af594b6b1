"""Sharded parameters as the optimizer sees them: flat shards, gradients in host memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from nvmeswap.errors import SwapError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.gradients import HostGradients
from nvmeswap.swap.home import refuse_odd_dtype
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, StateItem
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.entries import Entry


class PassState(enum.Enum):
    """What the gradients are worth; `zero_gradients` leads back to WHOLE from everywhere.

    WHOLE: they are right. VOID: a shard was NaN in them, on some rank; all ranks know. CUT_SHORT:
    backward was ended by an error, and FSDP2 is still in the middle of it.
    """

    WHOLE = "whole"
    VOID = "void"
    CUT_SHORT = "cut short"


class ShardedHome:
    """`nvmeswap.swap.home.ParameterHome` over FSDP2's shards, swapped or resident.

    A swapped shard's new values go to the parameter swapper. One stored in bf16 is the upper half
    of its master, and comes from there for the update; the rest is kept with its moments, as is the
    whole fp32 master of others. A shard that stays on a GPU is copied there; one on the CPU is
    updated in place, with the rest beside its moments if it is bf16.
    """

    def __init__(self, model: nn.Module, entries: Sequence[Entry], agreement: Agreement) -> None:
        self.params: PartitionedParamSwapper | None = None
        self.gradients = HostGradients()
        self.pending_scales: dict[str, torch.Tensor] = {}  # the optimizer's, by clipping
        self._model = model
        self._agreement = agreement
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._frozen = [entry for entry in entries if not entry.parameter.requires_grad]
        self._versions: dict[str, int] = {}
        self._pass = PassState.WHOLE

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """FSDP2 has reduced a gradient: add it to the host's, and free the device's."""
        gradient = parameter.grad
        if gradient is not None:
            key = self._entry(parameter).key
            self.apply_scale(key)
            self.gradients.add(key, fsdp.local_tensor(gradient))
            parameter.grad = None

    def apply_scale(self, key: str) -> None:
        """Multiply a gradient by the scale that was to be applied at its use: another one is to be
        added, or it is to be clipped again."""
        scale = self.pending_scales.pop(key, None)
        if scale is not None:
            self.gradients.scale(key, scale)

    @property
    def is_alone(self) -> bool:
        return self._agreement.alone

    @property
    def entries(self) -> Sequence[Entry]:
        """All parameters, frozen ones included."""
        return list(self._entries.values())

    def key_of(self, parameter: torch.Tensor) -> str:
        return self._entry(parameter).key

    def item(
        self, parameter: torch.Tensor, states: Sequence[str], state_dtype: torch.dtype
    ) -> StateItem:
        entry = self._entry(parameter)
        refuse_odd_dtype(entry.parameter.dtype)
        form, output = MasterForm.WHOLE, None
        in_place = self._in_place(entry) is not None
        if not in_place and entry.store_dtype is not STATE_DTYPE:
            output = entry.store_dtype
        if entry.store_dtype is torch.bfloat16 and (in_place or entry.swapped):
            form = MasterForm.SPLIT
        elif in_place:
            form = MasterForm.IN_PLACE
        return StateItem(entry.key, entry.numel, form, tuple(states), state_dtype, output)

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        return self._entry(parameter).key in self.gradients

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.gradients.get(self._entry(parameter).key)

    def in_place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._in_place(self._entry(parameter))

    def _in_place(self, entry: Entry) -> torch.Tensor | None:
        if entry.swapped or entry.local is None:
            return None
        if entry.local.device.type != "cpu":
            return None
        if entry.local.dtype not in (STATE_DTYPE, torch.bfloat16):
            return None
        return entry.local.view(-1)

    def edited_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        entry = self._entry(parameter)
        if entry.swapped or entry.local is None:
            return None  # writing a swapped parameter reaches its master
        if self._versions.get(entry.key) == entry.local._version:
            return None
        return entry.local.view(-1).to("cpu")

    def initial_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        entry = self._entry(parameter)
        return None if entry.local is None else entry.local.view(-1)

    def fetch(
        self, parameter: torch.Tensor, start: int, out: torch.Tensor, lane: Lane
    ) -> list[StoreRequest]:
        assert self.params is not None
        return self.params.read_part(self._entry(parameter).key, start, out, lane)

    def publish(
        self, parameter: torch.Tensor, start: int, values: torch.Tensor
    ) -> list[StoreRequest]:
        entry = self._entry(parameter)
        if entry.swapped:
            assert self.params is not None
            return self.params.update(entry.key, start, values.to(entry.store_dtype))
        assert entry.local is not None
        entry.local.view(-1)[start : start + values.numel()].copy_(values)
        return []

    def shape(self, parameter: torch.Tensor) -> torch.Size:
        return self._entry(parameter).shape

    gradient_comes_once = False  # a loss over the shards themselves, and one in chunks, come apart

    def begin_overlapped_step(self, error: SwapError | None) -> None:
        self._refuse_thawed()
        try:
            if error is not None:
                self._agreement.report(error)
            self._agreement.raise_if_any_rank_failed(
                fix="call zero_grad() on all ranks and repeat forward and backward"
            )
        except SwapError:
            self._pass = PassState.CUT_SHORT  # it was raised in backward
            raise

    def end_overlapped_pass(self) -> None:
        if self._pass is not PassState.WHOLE:
            raise SwapUsageError(
                "backward was ended by an error after updates had begun",
                intact="nothing: some parameters have been updated",
                fix="load the last checkpoint, parameters included",
            )
        self._refuse_half_sharded()
        self._agreement.raise_if_any_rank_failed(fix="load the last checkpoint on all ranks")

    def forget_gradient(self, parameter: torch.Tensor) -> None:
        self.gradients.clear([self._entry(parameter).key])

    def before_step(self) -> None:
        if self._pass is not PassState.WHOLE:
            raise SwapUsageError(
                "the gradients come from a pass in which a shard could not be read",
                fix="call zero_grad() on all ranks and repeat forward and backward",
            )
        self._refuse_thawed()
        self._refuse_half_sharded()
        try:
            self._agreement.raise_if_any_rank_failed(
                fix="call zero_grad() on all ranks and repeat forward and backward"
            )
        except SwapError:
            self._pass = PassState.VOID
            raise

    def _refuse_thawed(self) -> None:
        thawed = [entry.key for entry in self._frozen if entry.parameter.requires_grad]
        if thawed:
            raise SwapUsageError(
                f"{thawed[0]} was frozen when the model was sharded and has no optimizer state",
                fix="set requires_grad before nvmeswap.zero3.shard",
            )

    def _refuse_half_sharded(self) -> None:
        half_done = fsdp.gathered_after_backward(self._model)
        if half_done:
            raise SwapUsageError(
                f"backward left {half_done[0]} gathered, with part of its gradient",
                fix="use checkpoint(..., use_reentrant=False) around a block that is used twice",
            )

    def after_step(self, error: SwapError | None) -> None:
        if error is not None:
            self._agreement.report(error)
        self._agreement.raise_if_any_rank_failed(fix="call step() again on all ranks")
        if self.params is not None:
            self.params.end_step()
        self.drop_gathered()

    def forget_edits(self, parameters: Iterable[torch.Tensor]) -> None:
        for entry in map(self._entry, parameters):
            if entry.local is not None:
                self._versions[entry.key] = entry.local._version

    def drop_gathered(self) -> None:
        """The next forward gathers every parameter anew."""
        fsdp.reshard_all(self._model)

    def backward_was_cut_short(self) -> None:
        """An error was raised in the middle of a backward pass (one rank only)."""
        self._pass = PassState.CUT_SHORT

    def refuse_half_a_pass(self) -> None:
        """Raise if FSDP2 is still in the middle of a pass that an error ended."""
        if self._pass is PassState.CUT_SHORT:
            raise SwapUsageError(
                "the last backward was ended by an error",
                fix="call optimizer.zero_grad() first, then repeat forward and backward",
            )

    def zero_gradients(
        self, *, set_to_none: bool, parameters: Iterable[torch.Tensor] | None = None
    ) -> None:
        if self._pass is PassState.CUT_SHORT:
            fsdp.abandon_pass(self._model)
        if parameters is None or self._pass is not PassState.WHOLE:
            keys = None
        else:
            keys = [self._entries[id(p)].key for p in parameters if id(p) in self._entries]
        self._pass = PassState.WHOLE
        for key in list(self.pending_scales) if keys is None else keys:
            self.pending_scales.pop(key, None)
        if set_to_none:
            self.gradients.clear(keys)
        else:
            self.gradients.zero(keys)

    def _entry(self, parameter: torch.Tensor) -> Entry:
        return self._entries[id(parameter)]
