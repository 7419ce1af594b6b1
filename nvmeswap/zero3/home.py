"""Sharded parameters as the optimizer sees them: flat shards, gradients in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
from nvmeswap.zero3.agreement import Agreement, GatherOrder
from nvmeswap.zero3.entries import Entry
from nvmeswap.zero3.gradient import HeldGradient
from nvmeswap.zero3.tensor import ShardHandle, register_source


class ShardedHome:
    """`nvmeswap.swap.home.ParameterHome` over FSDP2's shards, swapped or resident.

    A swapped shard's new values go to the parameter swapper. One stored in bf16 is the upper half
    of its master, and comes from there for the update; the rest is kept with its moments, as is the
    whole fp32 master of others. A shard that stays on the CPU, or where updates are computed, is
    updated in place, with the rest beside its moments if it is bf16; another one is copied there.
    """

    def __init__(self, model: nn.Module, entries: Sequence[Entry], agreement: Agreement) -> None:
        self.params: PartitionedParamSwapper | None = None
        # While the model is being built: its values, asked for in the order of the entries.
        self.first_values: Callable[[Entry], torch.Tensor] | None = None
        # A step is over, and what the next pass uses first can be brought to the device.
        self.before_pass: Callable[[], None] = lambda: None
        self.gradients = HostGradients()
        self.pending_scales: dict[str, torch.Tensor] = {}  # the optimizer's, by clipping
        self._update_device = torch.device("cpu")
        self._model = model
        self._agreement = agreement
        self._entries = {id(entry.parameter): entry for entry in entries}
        self._number = register_source(self)
        self._frozen = [entry for entry in entries if not entry.parameter.requires_grad]
        self._versions: dict[str, int] = {}
        self.gather_order = GatherOrder(
            agreement, [fsdp.shard_group(entry.record) for entry in entries]
        )
        self._serials: dict[str, int] = {}  # of the gradient that each key has, or had last
        self._used: set[str] = set()  # whose gradient an overlapped step has used and given up
        self.is_overlapped = False  # updates have begun in backward, and step() is still to come
        self.gradients_were_edited = False  # since the last step, by a GradScaler for instance
        self._is_void = False  # a shard was NaN in the gradients, on some rank; all ranks know

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """FSDP2 has reduced a gradient: to the host with it, and free the device's. What is added
        to one that is held comes by `add_to_gradient`."""
        gradient = parameter.grad
        if gradient is None:
            return
        local = fsdp.local_tensor(gradient)
        if isinstance(local, HeldGradient):
            return
        key = self._entry(parameter).key
        self._forget([key])  # an earlier one, that the user has dropped
        self.gradients.add(key, local)
        handle = ShardHandle(self._number, key)
        serial = self._serials[key] = self._serials.get(key, 0) + 1
        held = HeldGradient(
            handle, serial, shape=local.shape, dtype=local.dtype, device=local.device
        )
        fsdp.set_local_tensor(gradient, held)

    def follow_the_user(self) -> None:
        """`parameter.grad` is what counts: None is no gradient, whatever is held."""
        for entry in self._entries.values():
            if entry.parameter.grad is not None:
                self.take_gradient(entry.parameter)
            elif entry.key in self.gradients:
                self._forget([entry.key])

    def _forget(self, keys: Sequence[str]) -> None:
        self.gradients.clear(keys)
        for key in keys:
            self.pending_scales.pop(key, None)
            self._used.discard(key)

    # --- GradientSource -----------------------------------------------------------------------

    def gradient_values(self, key: str, serial: int) -> torch.Tensor:
        self.apply_scale(key)
        values = self.gradients.get(key) if serial == self._serials[key] else None
        if key in self._used:
            raise SwapUsageError(
                f"the gradient of {key} was used during backward (overlap_step) and given up",
                fix="leave out overlap_step, or what needs gradients after backward",
            )
        if values is None:
            raise SwapUsageError(
                f"the gradient of {key} was forgotten, or replaced by a later one",
                fix="clone() what is to outlive zero_grad(), grad = None and close()",
            )
        self.gradients.was_edited(key)  # it may be, by a view: take its norm anew
        return values

    def add_to_gradient(self, key: str, serial: int, values: torch.Tensor) -> None:
        if key in self._used:
            raise SwapUsageError(
                f"a gradient of {key} came after its update had begun",
                intact="nothing: some parameters have been updated",
                fix="load the last checkpoint; tell gradient_accumulation_steps how many backward "
                "passes make a step, and call zero_grad() after step()",
            )
        self.gradient_values(key, serial)
        self.gradients.add(key, values)

    def gradient_was_edited(self, key: str) -> None:
        self.gradients_were_edited = True
        self.gradients.was_edited(key)

    def apply_scale(self, key: str) -> None:
        """Multiply a gradient by the scale that was to be applied at its use: another one is to be
        added, or it is to be clipped again."""
        scale = self.pending_scales.pop(key, None)
        if scale is not None:
            self.gradients.scale(key, scale)

    # --- ParameterHome ------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        return self._agreement.alone

    @property
    def entries(self) -> Sequence[Entry]:
        """All parameters, frozen ones included."""
        return list(self._entries.values())

    def owns(self, parameter: torch.Tensor) -> bool:
        """True for the parameters of this model, as they were when it was sharded."""
        return id(parameter) in self._entries

    def update_on(self, device: torch.device) -> None:
        self._update_device = device

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
        if entry.local.device.type != "cpu" and entry.local.device != self._update_device:
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
        values = entry.local.view(-1)
        return values.to("cpu") if self._in_place(entry) is None else values

    def initial_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        entry = self._entry(parameter)
        if self.first_values is not None:
            return self.first_values(entry)
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
        if error is not None:
            self._agreement.report(error)
        self._agreement.raise_if_any_rank_failed(
            fix="call zero_grad() on all ranks and repeat forward and backward"
        )
        self.is_overlapped = True

    def end_overlapped_pass(self) -> None:
        misuse = self._misuse()
        if misuse is not None:
            self._agreement.report(misuse)
        self.gather_order.report_differences()
        self._agreement.raise_if_any_rank_failed(fix="load the last checkpoint on all ranks")

    def forget_gradient(self, parameter: torch.Tensor) -> None:
        key = self._entry(parameter).key
        self._forget([key])
        self._used.add(key)  # parameter.grad stays, and raises when it is read

    def before_step(self) -> None:
        if self._is_void:
            raise SwapUsageError(
                "the gradients are of no use, as the last step() said",
                fix="call zero_grad() on all ranks and repeat forward and backward",
            )
        self.follow_the_user()
        misuse = self._misuse()
        if misuse is not None:
            self._agreement.report(misuse)
        self.gather_order.report_differences()
        try:
            self._agreement.raise_if_any_rank_failed(
                fix="call zero_grad() on all ranks and repeat forward and backward"
            )
        except SwapError:
            self._is_void = misuse is None
            raise

    def _misuse(self) -> SwapUsageError | None:
        """What the user did to the model that would train it wrongly without a word."""
        thawed = [entry.key for entry in self._frozen if entry.parameter.requires_grad]
        if thawed:
            return SwapUsageError(
                f"{thawed[0]} was frozen when the model was sharded and has no optimizer state",
                fix="set requires_grad before nvmeswap.zero3.shard",
            )
        for entry in self._entries.values():
            if not fsdp.is_in_its_place(entry.record, entry.parameter):
                return SwapUsageError(
                    f"{entry.key} was replaced by another parameter, which nobody trains",
                    fix="change values with copy_ or load_state_dict (without assign), and modules "
                    "before nvmeswap.zero3.shard",
                )
            if self._was_put_back(entry):
                return SwapUsageError(
                    f"{entry.key}.grad is a gradient that was forgotten or replaced",
                    fix="clone() a gradient that is to be put back after zero_grad()",
                )
        if fsdp.backward_was_cut_short(self._model):
            return self._half_a_pass()
        half_done = fsdp.gathered_after_backward(self._model)
        if half_done:
            return SwapUsageError(
                f"backward left {half_done[0]} gathered, with part of its gradient",
                fix="use checkpoint(..., use_reentrant=False) around a block that is used twice",
            )
        return None

    def after_step(self, error: SwapError | None, *, is_final: bool = False) -> None:
        if error is not None:
            self._agreement.report(error, is_final=is_final)
        self._agreement.raise_if_any_rank_failed(fix="call step() again on all ranks")
        if self.params is not None:
            self.params.end_step()
        self.drop_gathered()
        self.before_pass()

    @property
    def step_is_lost(self) -> bool:
        return self._agreement.was_final

    def forget_edits(self, parameters: Iterable[torch.Tensor]) -> None:
        for entry in map(self._entry, parameters):
            if entry.local is not None:
                self._versions[entry.key] = entry.local._version

    def drop_gathered(self) -> None:
        """The next forward gathers every parameter anew."""
        fsdp.reshard_all(self._model)

    def _was_put_back(self, entry: Entry) -> bool:
        gradient = entry.parameter.grad
        local = None if gradient is None else fsdp.local_tensor(gradient)
        if not isinstance(local, HeldGradient) or entry.key in self._used:
            return False
        return local.serial != self._serials[entry.key] or entry.key not in self.gradients

    def gathers_what_was_updated(self, key: str) -> None:
        """Report it if backward asks for a parameter whose update is under way: what it computes
        with is of the next step."""
        if key in self._used and fsdp.in_backward():
            self._agreement.report(
                SwapUsageError(
                    f"{key} was needed in backward once more after its gradient was final",
                    fix="leave out overlap_step for a model that uses weights without gradient",
                )
            )

    def refuse_while_updating(self) -> None:
        """Raise if updates have begun in backward, and step() has not been called."""
        if self.is_overlapped:
            raise SwapUsageError(
                "parameters are being updated since backward (overlap_step)",
                fix="call step() first, whatever else is to be done",
            )

    def refuse_half_a_pass(self) -> None:
        """Raise if FSDP2 is still in the middle of a backward that an error ended."""
        if fsdp.backward_was_cut_short(self._model):
            raise self._half_a_pass()

    @staticmethod
    def _half_a_pass() -> SwapUsageError:
        return SwapUsageError(
            "the last backward was ended by an error",
            fix="call optimizer.zero_grad() first, then repeat forward and backward",
        )

    def zero_gradients(
        self, *, set_to_none: bool, parameters: Iterable[torch.Tensor] | None = None
    ) -> None:
        is_cut_short = fsdp.backward_was_cut_short(self._model)
        if is_cut_short:
            fsdp.abandon_backward(self._model)
        if parameters is None or is_cut_short or self._is_void:
            entries = list(self._entries.values())
        else:
            wanted = set(map(id, parameters))
            entries = [
                entry
                for entry in self._entries.values()
                if not wanted.isdisjoint(map(id, fsdp.ways_to_see(entry.record)))
            ]
        self._is_void = False
        if set_to_none:
            self._forget([entry.key for entry in entries])
            for entry in entries:
                entry.parameter.grad = None
        else:
            self.gradients.zero(entry.key for entry in entries)

    def _entry(self, parameter: torch.Tensor) -> Entry:
        return self._entries[id(parameter)]
