"""The proof that an optimizer class treats each element alone: pieces get the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvmeswap.errors import SwapUsageError

Step = Callable[[Optimizer], Any]
"""A class's `step`, of an optimizer of that class."""
Scalars = dict[str, Any]
StepPiece = Callable[
    [Tensor, Tensor, dict[str, Tensor], Scalars | None, dict[str, Any], Collection[str]], Scalars
]
"""(master, gradient, states, scalars, options, those scalars that the class has on the device) to
the scalars after the step."""
# Torch's fused kernels compute 16 elements at a time and what remains one by one, with other
# rounding; so the proof cuts at multiples of 64, and its last piece ends in a remainder, too.
PROOF_SHAPE = (5, 71)
_PROOF_CUTS = ((0, 64), (64, 192), (192, 355))
# From step to step the gradients grow and shrink, which trips whatever clips by a norm.
_PROOF_SCALES = (1.0, 30.0, 0.03)


@dataclass(frozen=True, slots=True)
class Proved:
    """What a class keeps for a parameter with options of one kind: states of its shape, and of its
    scalars those that it keeps on the parameter's device, as fused kernels need them."""

    states: tuple[str, ...]
    on_device: frozenset[str]


class Proof:
    """Steps a small parameter of a class whole and in pieces, on `device`, and compares.

    Args: `options` for the class's constructor; `step`, the class's own without hooks.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        device: torch.device,
        step: Step,
    ) -> None:
        self._class = optimizer_class
        self._options = options
        self._device = device
        self._step = step

    def run(
        self, options: dict[str, Any], shape: tuple[int, ...], step_piece: StepPiece
    ) -> Proved:
        """With `options` of a group; `step_piece` is what is to be proved. Raises SwapUsageError
        where the class can't be served."""
        first, *gradients = (values.to(self._device).reshape(shape) for values in _proof_values())
        with random_state_left(self._device):
            whole, state, names = self._step_whole(first, gradients, options)
            proved = Proved(names, self._kept_there(state))
            try:
                pieces = self._step_in_pieces(first, gradients, options, proved, step_piece)
            except Exception as error:
                why = "it can't step a flattened parameter"
                refuse(self._class, why, f"{type(error).__name__}: {error}")
        dense = {"the parameter": whole, **{name: state[name] for name in names}}
        for label, value in dense.items():
            if not _has_bits_of(value.reshape(-1), pieces.pop(label)):
                refuse(
                    self._class,
                    "it is not elementwise",
                    f"{label} differs between a parameter stepped whole and stepped in pieces",
                )
        if pieces.pop("scalars") != [_plain(state, names)] * len(_PROOF_CUTS):
            why = "its scalars depend on the parameter's values"
            refuse(self._class, "it is not elementwise", why)
        return proved

    def _kept_there(self, state: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(
            name
            for name, value in state.items()
            if isinstance(value, Tensor) and value.device.type == self._device.type
        )

    def _step_whole(
        self, first: Tensor, gradients: list[Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any], tuple[str, ...]]:
        """The parameter and its state after all steps, and the names of the dense states."""
        parameter = torch.nn.Parameter(first.clone())
        optimizer = self._class([parameter], **self._options)
        optimizer.param_groups[0].update({**options, "params": [parameter]})
        names: list[tuple[str, ...]] = []
        marks = []
        for gradient in gradients:
            parameter.grad = gradient.clone()
            try:
                self._step(optimizer)
            except Exception as error:
                refuse(
                    self._class,
                    "its step() failed on a dense gradient",
                    f"{type(error).__name__}: {error}",
                )
            names.append(self._dense_names(optimizer.state[parameter], first.shape))
            marks.append([_plain(vars(optimizer)), _plain(optimizer.param_groups[0])])
        if names[0] != names[-1]:
            refuse(self._class, "it makes some of its state after the first step only")
        if marks[-2] != marks[-1]:  # shared by all parameters, so it would count pieces
            why = "its step() changes the optimizer or its groups, not only their state"
            refuse(self._class, why)
        return parameter.detach(), optimizer.state[parameter], names[0]

    def _dense_names(self, state: Mapping[str, Any], shape: torch.Size) -> tuple[str, ...]:
        names = []
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and value.shape == shape and value.dtype is torch.float32:
                names.append(name)
            elif not (value.numel() == 1 if is_tensor else _is_plain(value)):
                what = f"{value.dtype} of {tuple(value.shape)}" if is_tensor else type(value)
                refuse(
                    self._class,
                    f"its state {name} is neither a scalar nor fp32 of the parameter's shape",
                    f"for a parameter of {tuple(shape)} it is {what}",
                )
        return tuple(names)

    def _step_in_pieces(
        self,
        first: Tensor,
        gradients: list[Tensor],
        options: dict[str, Any],
        proved: Proved,
        step_piece: StepPiece,
    ) -> dict[str, Any]:
        """The parameter and its dense states after all steps, flat, and the scalars of each
        piece."""
        master = first.flatten().clone()
        states = {name: torch.full_like(master, torch.nan) for name in proved.states}
        scalars: list[dict[str, Any] | None] = [None] * len(_PROOF_CUTS)
        for gradient in gradients:
            for index, cut in enumerate(_PROOF_CUTS):
                piece = slice(*cut)
                scalars[index] = step_piece(
                    master[piece],
                    gradient.flatten()[piece].clone(),
                    {name: state[piece] for name, state in states.items()},
                    scalars[index],
                    options,
                    proved.on_device,
                )
        plain = [_plain(after) for after in scalars if after is not None]
        return {"the parameter": master, **states, "scalars": plain}


def refuse(optimizer_class: type[Optimizer], why: str, cause: str | None = None) -> NoReturn:
    """Raise SwapUsageError for the class."""
    raise SwapUsageError(
        f"{optimizer_class.__name__} can't be stepped piece by piece: {why}",
        cause=cause,
        fix="use an elementwise optimizer such as torch.optim.AdamW, or keep this one's state "
        "in memory",
    )


def blank(device: torch.device) -> Tensor:
    """A small parameter."""
    return torch.zeros(PROOF_SHAPE, dtype=torch.float32, device=device)


def random_state_left(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers that are drawn within are drawn again after it."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _proof_values() -> list[Tensor]:
    """The parameter and its gradients; from beginning to end they grow ten-thousandfold, so that
    norms and means of pieces differ."""
    generator = torch.Generator("cpu").manual_seed(0)
    zeros = blank(torch.device("cpu"))
    spread = torch.logspace(-3, 1, zeros.numel(), dtype=torch.float32, device="cpu")
    return [
        zeros.clone().normal_(generator=generator) * spread.reshape(PROOF_SHAPE) * scale
        for scale in (1.0, *_PROOF_SCALES)
    ]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    """The scalars among `values`, comparable even where they are NaN."""
    return {
        name: repr(value.tolist() if isinstance(value, Tensor) else value)
        for name, value in values.items()
        if name not in without
        and (value.numel() == 1 if isinstance(value, Tensor) else _is_plain(value))
    }


def _has_bits_of(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
