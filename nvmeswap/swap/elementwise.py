"""Any elementwise torch optimizer over pieces of parameters whose state lives elsewhere.

An optimizer is elementwise if each element's new value and state depend on that element alone: its
value, its gradient, its state, the group's options and the parameter's scalars (`step`). Only then
may a parameter be stepped piece by piece. Nobody declares this, so each class is put to the proof
when it is first met, and again for each kind of options: a small parameter stepped whole must get
the bits of its flattened form stepped in pieces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.fused import KERNELS

# Torch's fused kernels compute 16 elements at a time and what remains one by one, with other
# rounding; so the proof cuts at multiples of 64, and its last piece ends in a remainder, too.
_PROOF_SHAPE = (5, 71)
_PROOF_CUTS = ((0, 64), (64, 192), (192, 355))
# From step to step the gradients grow and shrink, which trips whatever clips by a norm.
_PROOF_SCALES = (1.0, 30.0, 0.03)


class ElementwiseOptimizer:
    """One torch optimizer class and its options, as a function of pieces.

        rule = ElementwiseOptimizer(torch.optim.AdamW, {"lr": 1e-3})
        names = rule.states_of(group)                      # ("exp_avg", "exp_avg_sq")
        scalars = rule.update(master, gradient, states, None, group)     # the first step
        scalars = rule.update(master, gradient, states, scalars, group)

    The results are those of `optimizer_class(params, **options)` over whole parameters, bit for
    bit, if pieces begin at multiples of 64 elements. Where the class's constructor has a `fused`
    that is None by default, and neither `fused` nor `foreach` is given, it is `fused=True`: results
    are then those of `optimizer_class(params, ..., fused=True)`. `fused=False` is obeyed.

    `defaults`: what the class made of the options, for the constructor of an outer optimizer.

    Args: `optimizer_class` and `options` as for `optimizer_class(params, **options)`.
    Raises: SwapUsageError for a class that is not elementwise, has state other than scalars and
    fp32 tensors of the parameter's shape, or needs a closure, and for `differentiable` and
    `capturable`; whatever the class itself raises for its options.
    Blocking: no I/O; construction takes some milliseconds. Threads: one at a time.
    Hooks: global step hooks are not called for pieces, unless the class's `step` itself calls
    its parent's `step`. torch's global random state is left as it is.
    """

    def __init__(self, optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> None:
        self._class = optimizer_class
        self._name = optimizer_class.__name__
        self._options = dict(options)
        fused = inspect.signature(optimizer_class).parameters.get("fused")
        self._may_choose_fused = fused is not None and fused.default is None
        if self._chooses_fused(options):
            self._options["fused"] = True
        with torch.random.fork_rng(devices=[]):
            self._inner = self._class([_blank()], **self._options)
        self._inner.state.clear()
        self.defaults: dict[str, Any] = dict(self._inner.defaults)
        self._step = _unhooked_step(optimizer_class)
        self._refuse_closures()
        self._states_by_kind: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._kernel = KERNELS.get(optimizer_class)
        self.states_of(self.defaults)

    @property
    def class_name(self) -> str:
        """Of the class, without its module: those move."""
        return self._name

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the states of the parameter's shape that the options in `group` call for,
        in the class's order. Raises SwapUsageError if the class can't be served with them.

        Remembered for each kind of options: fractions that differ in value, but not in being
        zero, are of one kind.
        """
        kind = tuple([(name, _kind(group[name])) for name in group if name != "params"])
        names = self._states_by_kind.get(kind)
        if names is None:
            names = self._states_by_kind[kind] = self._prove(self._resolved(group))
        return names

    def update(
        self,
        master: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        scalars: Mapping[str, Any] | None,
        group: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Step one piece; returns the parameter's scalars after the step.

        `master`, `gradient` and each of `states` are flat fp32 tensors of one size in host memory;
        `master` and `states` are updated in place, `gradient` may be overwritten. `scalars` are
        the parameter's before the step, and are not changed; None means that it was never stepped:
        then the contents of `states` don't matter, and the class sets their first values. `group`
        holds the options of now.

        Raises: SwapUsageError, before anything is changed, if the options need a state that is
        not among `states`.
        """
        self.check(states.keys(), group, is_first=scalars is None)
        return self._step_piece(master, gradient, states, scalars, self._resolved(group))

    def check(
        self, states: Collection[str], group: Mapping[str, Any], *, is_first: bool
    ) -> None:
        """Raise SwapUsageError if the options need a state that is not among `states`, or in a
        first step don't need one that is."""
        needed = self.states_of(group)
        missing = [name for name in needed if name not in states]
        # Later on an unneeded state rests, as in torch; but first it would have no contents.
        unset = [name for name in states if name not in needed] if is_first else []
        if missing or unset:
            raise SwapUsageError(
                f"the options of {self._name} were changed so that the state "
                f"{', '.join(missing or unset)} {'is needed' if missing else 'is not set'}",
                cause="a parameter's states are laid out when the optimizer is built",
                fix="give the options that call for it to the constructor",
            )

    def modern(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Saved scalars as the class has them now: old versions of torch counted steps in numbers,
        new ones in tensors."""
        is_torchs = self._class.__module__.startswith("torch.optim")
        return {
            name: torch.tensor(float(value), device="cpu")
            if is_torchs and name == "step" and isinstance(value, (int, float))
            else value
            for name, value in scalars.items()
        }

    # --- one step -----------------------------------------------------------------------------

    def _step_piece(
        self,
        master: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        scalars: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        kernel = self._kernel
        if (
            kernel is not None
            and scalars is not None
            and options.get("fused")
            and not isinstance(options["lr"], Tensor)
        ):
            return kernel(master, gradient, states, scalars, options)
        piece = master.detach().requires_grad_()
        piece.grad = gradient
        optimizer = self._inner
        if scalars is None:  # some classes make the first state in their constructor
            optimizer = self._class([piece], **self._options)
        else:
            optimizer.state[piece] = {**states, **_copied(scalars)}
        optimizer.param_groups[0] = {**options, "params": [piece]}
        try:
            self._step(optimizer)
            after = optimizer.state[piece]
        finally:  # the caller's memory must not be kept
            optimizer.state.clear()
            optimizer.param_groups[0]["params"] = []
        if piece.data_ptr() != master.data_ptr():
            master.copy_(piece.detach())
        for name, memory in states.items():
            value = after.pop(name, memory)
            if value is not memory:
                memory.copy_(value)
        late = [n for n, v in after.items() if isinstance(v, Tensor) and v.numel() != 1]
        if late:
            raise SwapUsageError(
                f"{self._name} makes the state {late[0]} in a later step",
                cause="a parameter's states are laid out when the optimizer is built",
                intact="nothing: this step is half made",
                fix="load the last checkpoint, and use another optimizer",
            )
        return dict(after)

    def _chooses_fused(self, options: Mapping[str, Any]) -> bool:
        return (
            self._may_choose_fused
            and options.get("fused") is None
            and options.get("foreach") is None
            and not options.get("differentiable")
            and not options.get("capturable")
        )

    def _resolved(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `group`; where a loaded state left `fused` open, it is chosen again."""
        options = dict(group)
        if self._chooses_fused(group):
            options["fused"] = True
        return options

    # --- the proof ----------------------------------------------------------------------------

    def _refuse(self, why: str, cause: str | None = None) -> NoReturn:
        raise SwapUsageError(
            f"{self._name} can't be stepped piece by piece: {why}",
            cause=cause,
            fix="use an elementwise optimizer such as torch.optim.AdamW, or keep this one's state "
            "in memory",
        )

    def _refuse_closures(self) -> None:
        _, *others = inspect.signature(self._step).parameters.values()
        if any(
            parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in others
        ):
            self._refuse("its step() needs a closure")

    def _prove(self, options: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states, if stepping whole and in pieces agree; else refuse."""
        for name in ("differentiable", "capturable"):
            if options.get(name):
                raise SwapUsageError(
                    f"{self._name}({name}=True) is not served",
                    cause="state that is swapped is updated outside of graphs",
                    fix=f"leave {name} out",
                )
        # Some classes treat matrices and convolutions' weights each in a way of their own.
        names, _ = self._try(options, _PROOF_SHAPE), self._try(options, (*_PROOF_SHAPE, 1, 1))
        return names

    def _try(self, options: dict[str, Any], shape: tuple[int, ...]) -> tuple[str, ...]:
        try:
            return self._compare(options, shape)
        except SwapUsageError:
            if self._kernel is None:
                raise
            self._kernel = None  # perhaps it is the kernel's fault, and not the class's
            return self._compare(options, shape)

    def _compare(self, options: dict[str, Any], shape: tuple[int, ...]) -> tuple[str, ...]:
        first, *gradients = (values.reshape(shape) for values in _proof_values())
        with torch.random.fork_rng(devices=[]):
            whole, state, names = self._step_whole(first, gradients, options)
            try:
                pieces = self._step_in_pieces(first, gradients, options, names)
            except Exception as error:
                self._refuse(
                    "it can't step a flattened parameter", f"{type(error).__name__}: {error}"
                )
        dense = {"the parameter": whole, **{name: state[name] for name in names}}
        for label, value in dense.items():
            if not _has_bits_of(value.reshape(-1), pieces.pop(label)):
                self._refuse(
                    "it is not elementwise",
                    f"{label} differs between a parameter stepped whole and stepped in pieces",
                )
        if pieces.pop("scalars") != [_plain(state, names)] * len(_PROOF_CUTS):
            self._refuse("it is not elementwise", "its scalars depend on the parameter's values")
        return names

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
                self._refuse(
                    "its step() failed on a dense gradient", f"{type(error).__name__}: {error}"
                )
            names.append(self._dense_names(optimizer.state[parameter], first.shape))
            marks.append([_plain(vars(optimizer)), _plain(optimizer.param_groups[0])])
        if names[0] != names[-1]:
            self._refuse("it makes some of its state after the first step only")
        if marks[-2] != marks[-1]:  # shared by all parameters, so it would count pieces
            self._refuse("its step() changes the optimizer or its groups, not only their state")
        return parameter.detach(), optimizer.state[parameter], names[0]

    def _dense_names(self, state: Mapping[str, Any], shape: torch.Size) -> tuple[str, ...]:
        names = []
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and value.shape == shape and value.dtype is torch.float32:
                names.append(name)
            elif not (value.numel() == 1 if is_tensor else _is_plain(value)):
                what = f"{value.dtype} of {tuple(value.shape)}" if is_tensor else type(value)
                self._refuse(
                    f"its state {name} is neither a scalar nor fp32 of the parameter's shape",
                    f"for a parameter of {tuple(shape)} it is {what}",
                )
        return tuple(names)

    def _step_in_pieces(
        self,
        first: Tensor,
        gradients: list[Tensor],
        options: dict[str, Any],
        names: tuple[str, ...],
    ) -> dict[str, Any]:
        """The parameter and its dense states after all steps, flat, and the scalars of each
        piece."""
        master = first.flatten().clone()
        states = {name: torch.full_like(master, torch.nan) for name in names}
        scalars: list[dict[str, Any] | None] = [None] * len(_PROOF_CUTS)
        for gradient in gradients:
            for index, cut in enumerate(_PROOF_CUTS):
                piece = slice(*cut)
                scalars[index] = self._step_piece(
                    master[piece],
                    gradient.flatten()[piece].clone(),
                    {name: state[piece] for name, state in states.items()},
                    scalars[index],
                    options,
                )
        plain = [_plain(after) for after in scalars if after is not None]
        return {"the parameter": master, **states, "scalars": plain}


def _blank() -> Tensor:
    return torch.zeros(_PROOF_SHAPE, dtype=torch.float32, device="cpu")


def _proof_values() -> list[Tensor]:
    """The parameter and its gradients; from beginning to end they grow ten-thousandfold, so that
    norms and means of pieces differ."""
    generator = torch.Generator("cpu").manual_seed(0)
    spread = torch.logspace(-3, 1, _blank().numel(), dtype=torch.float32, device="cpu")
    return [
        _blank().normal_(generator=generator) * spread.reshape(_PROOF_SHAPE) * scale
        for scale in (1.0, *_PROOF_SCALES)
    ]


def _unhooked_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's `step` without the wrapper for hooks that torch's constructor puts round it."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _copied(scalars: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in scalars.items()
    }


def _kind(option: Any) -> Any:
    """What of an option's value may decide which states there are."""
    if option is None or isinstance(option, (int, str)):
        return option
    if isinstance(option, (tuple, list)):
        return tuple([_kind(part) for part in option])
    return bool(option.any() if isinstance(option, Tensor) else option)


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
