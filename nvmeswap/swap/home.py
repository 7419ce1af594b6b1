"""Where the parameters of a swapped optimizer live: the optimizer's only view of them.

`ResidentHome` is for parameters that stay in memory. The ZeRO-3 plug has its own, whose parameters
are sharded and on NVMe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from nvmeswap.errors import SwapError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, StateItem


class ParameterHome(Protocol):
    """What an optimizer needs of its parameters. Tensors are flat, and on the host unless it says
    otherwise."""

    @property
    def is_alone(self) -> bool:
        """False if other ranks take part in each step."""

    def update_on(self, device: torch.device) -> None:
        """Called first: updates are computed there, also in the memory of parameters that are."""

    def key_of(self, parameter: torch.Tensor) -> str:
        """The stable name under which the parameter's state is stored."""

    def item(
        self, parameter: torch.Tensor, states: Sequence[str], state_dtype: torch.dtype
    ) -> StateItem:
        """How its optimizer state is to be laid out; `states` are the update's own."""

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether it has one now; raises SwapUsageError for one that can't be used."""

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Its gradient now, flat, any floating dtype, on the host or a GPU, or None."""

    def in_place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's own memory, on the host or where updates are computed, if new values are
        to be made right there, else None."""

    def edited_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Its values now, if somebody else has written to it since the last step (as
        load_state_dict does), or its master was never told of it; None if that is up to date. On
        the host, or its own memory if it is `in_place`."""

    def initial_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Its values for a master, flat, any dtype and device; None if nothing but the master has
        them."""

    def fetch(
        self, parameter: torch.Tensor, start: int, out: torch.Tensor, lane: Lane
    ) -> list[StoreRequest]:
        """Fill `out` with its elements from `start` on, as they were published; it is to be left
        alone until the returned requests are done. For a split master that is not `in_place`."""

    def publish(
        self, parameter: torch.Tensor, start: int, values: torch.Tensor
    ) -> list[StoreRequest]:
        """Make `values` its elements from `start` on; they stay unchanged until the returned
        requests are done."""

    def shape(self, parameter: torch.Tensor) -> torch.Size:
        """Of its states, as a state_dict shows them."""

    def before_step(self) -> None:
        """Called first in each new step; raises if the gradients are not to be used."""

    def after_step(self, error: SwapError | None, *, is_final: bool = False) -> None:
        """Called when all parameters have their new values, or with what went wrong on the way;
        raises unless all went well on all ranks. `is_final`: the states are of no use now."""

    @property
    def step_is_lost(self) -> bool:
        """True if `after_step` last raised for a rank whose states are of no use."""

    def forget_edits(self, parameters: Iterable[torch.Tensor]) -> None:
        """What these are now, their masters are, too."""

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Forget or zero the gradients that are not in `parameter.grad`."""

    # For steps that begin during backward:

    @property
    def gradient_comes_once(self) -> bool:
        """True if a backward pass tells of each gradient once, when it is final in that pass."""

    def begin_overlapped_step(self, error: SwapError | None) -> None:
        """Called in backward, on all ranks, before the first update; raises on all of them if one
        has an `error`, or its gradients are of no use."""

    def end_overlapped_pass(self) -> None:
        """Called when backward is over, on all ranks; raises on all of them if a gradient that may
        have been used was of no use."""

    def forget_gradient(self, parameter: torch.Tensor) -> None:
        """Its gradient has been used."""


class ResidentHome:
    """Parameters in memory, on the CPU or a GPU; gradients in `parameter.grad`.

    fp32 parameters on the CPU, or where updates are computed, are their own master, bf16 ones the
    upper half of it. Others (fp16, or on a GPU beside the CPU's updates) have an fp32 master beside
    their states, and get its rounded values.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._keys: dict[torch.Tensor, str] = {}
        self._versions: dict[torch.Tensor, int] = {}

    @property
    def is_alone(self) -> bool:
        return True

    def update_on(self, device: torch.device) -> None:
        self._device = device

    def key_of(self, parameter: torch.Tensor) -> str:
        return self._keys.setdefault(parameter, f"param.{len(self._keys)}")

    def item(
        self, parameter: torch.Tensor, states: Sequence[str], state_dtype: torch.dtype
    ) -> StateItem:
        refuse_odd_dtype(parameter.dtype)
        _refuse_gaps(parameter)
        output = None
        if self.in_place(parameter) is None:
            form = MasterForm.WHOLE
            output = None if parameter.dtype is STATE_DTYPE else parameter.dtype
        else:
            form = MasterForm.IN_PLACE if parameter.dtype is STATE_DTYPE else MasterForm.SPLIT
        key, numel = self.key_of(parameter), parameter.numel()
        return StateItem(key, numel, form, tuple(states), state_dtype, output)

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise SwapUsageError(
                "sparse gradients are not served", fix="build the embedding with sparse=False"
            )
        return parameter.grad is not None

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        return gradient.detach().reshape(-1)

    def in_place(self, parameter: torch.Tensor) -> torch.Tensor | None:
        is_there = parameter.device.type == "cpu" or parameter.device == self._device
        if is_there and parameter.dtype in (STATE_DTYPE, torch.bfloat16):
            return parameter.detach().view(-1)
        return None

    def edited_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        # A write through `.data` is not counted; beside a whole master it can be told.
        here = self.in_place(parameter)
        is_whole = parameter.device.type == "cpu" and here is None
        if self._versions.get(parameter) == parameter._version and not is_whole:
            return None
        return parameter.detach().view(-1).to("cpu") if here is None else here

    def initial_values(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.detach().view(-1)

    def fetch(
        self, parameter: torch.Tensor, start: int, out: torch.Tensor, lane: Lane
    ) -> list[StoreRequest]:
        raise AssertionError("every split master is in place here")

    def publish(
        self, parameter: torch.Tensor, start: int, values: torch.Tensor
    ) -> list[StoreRequest]:
        parameter.detach().view(-1)[start : start + values.numel()].copy_(values)
        return []

    def shape(self, parameter: torch.Tensor) -> torch.Size:
        return parameter.shape

    def before_step(self) -> None: ...

    def after_step(self, error: SwapError | None, *, is_final: bool = False) -> None:
        if error is not None:
            raise error

    @property
    def step_is_lost(self) -> bool:
        return False  # alone, the states themselves say so

    def forget_edits(self, parameters: Iterable[torch.Tensor]) -> None:
        self._versions.update({parameter: parameter._version for parameter in parameters})

    def zero_gradients(self, *, set_to_none: bool) -> None: ...

    @property
    def gradient_comes_once(self) -> bool:
        return True

    def begin_overlapped_step(self, error: SwapError | None) -> None:
        self.after_step(error)

    def end_overlapped_pass(self) -> None: ...

    def forget_gradient(self, parameter: torch.Tensor) -> None:
        parameter.grad = None


def refuse_odd_dtype(dtype: torch.dtype) -> None:
    """Raise SwapUsageError for parameters that an fp32 master can't stand for."""
    if not dtype.is_floating_point or dtype.itemsize > STATE_DTYPE.itemsize:
        raise SwapUsageError(
            f"a {dtype} parameter can't be trained here: its state would be {STATE_DTYPE}",
            fix="use fp32, bf16 or fp16 parameters, or set requires_grad_(False)",
        )


def _refuse_gaps(parameter: torch.Tensor) -> None:
    if not parameter.is_contiguous():
        raise SwapUsageError(
            f"a parameter of shape {tuple(parameter.shape)} and stride {parameter.stride()} is not "
            "contiguous",
            fix="make it contiguous before the optimizer is built",
        )
