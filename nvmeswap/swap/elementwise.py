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
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.fused import FIRST_SCALARS, KERNELS
from nvmeswap.swap.proof import PROOF_SHAPE, Proof, Proved, blank, random_state_left, refuse

_CPU = torch.device("cpu")


class ElementwiseOptimizer:
    """One torch optimizer class and its options, as a function of pieces.

        rule = ElementwiseOptimizer(torch.optim.AdamW, {"lr": 1e-3})
        names = rule.states_of(group)                      # ("exp_avg", "exp_avg_sq")
        scalars = rule.update(master, gradient, states, None, group)     # the first step
        scalars = rule.update(master, gradient, states, scalars, group)

    The results are those of `optimizer_class(params, **options)` over whole parameters, bit for
    bit, if pieces begin at multiples of 64 elements. Where the class's constructor has a `fused`
    that is None by default, and neither `fused` nor `foreach` is given, it is `fused=True`: results
    are then those of `optimizer_class(params, ..., fused=True)`. `fused=False` is obeyed. On a GPU
    they are those of parameters on that GPU; a class that torch has no fused kernel for there is
    not made fused.

    `defaults`: what the class made of the options, for the constructor of an outer optimizer.

    Args: `optimizer_class` and `options` as for `optimizer_class(params, **options)`; `device`,
    where all pieces are.
    Raises: SwapUsageError for a class that is not elementwise, has state other than scalars and
    fp32 tensors of the parameter's shape, or needs a closure, and for `differentiable` and
    `capturable`; whatever the class itself raises for its options.
    Blocking: no I/O; construction takes some milliseconds. Threads: one at a time. On a GPU all is
    queued on the current stream; `update` waits for it only where the class does, or keeps scalars
    there that no fused kernel of torch's is behind.
    Hooks: global step hooks are not called for pieces, unless the class's `step` itself calls
    its parent's `step`. torch's global random state is left as it is.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        device: torch.device = _CPU,
    ) -> None:
        self._class = optimizer_class
        self._name = optimizer_class.__name__
        self._options = dict(options)
        self._device = device
        fused = inspect.signature(optimizer_class).parameters.get("fused")
        self._may_choose_fused = fused is not None and fused.default is None
        if self._chooses_fused(options):
            self._may_choose_fused = self._is_fused_there()
        if self._chooses_fused(options):
            self._options["fused"] = True
        with random_state_left(self._device):
            self._inner = self._class([blank(self._device)], **self._options)
        self._inner.state.clear()
        self.defaults: dict[str, Any] = dict(self._inner.defaults)
        self._step = _unhooked_step(optimizer_class)
        self._refuse_closures()
        self._proved: dict[tuple[Any, ...], Proved] = {}
        self._kernel = KERNELS.get(optimizer_class)
        self._proof = Proof(optimizer_class, self._options, device, self._step)
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
        return self._proved_for(group).states

    def _proved_for(self, group: Mapping[str, Any]) -> Proved:
        kind = tuple([(name, _kind(group[name])) for name in group if name != "params"])
        proved = self._proved.get(kind)
        if proved is None:
            proved = self._proved[kind] = self._prove(self._resolved(group))
        return proved

    def update(
        self,
        master: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        scalars: Mapping[str, Any] | None,
        group: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Step one piece; returns the parameter's scalars after the step.

        `master`, `gradient` and each of `states` are flat fp32 tensors of one size on the device;
        `master` and `states` are updated in place, `gradient` may be overwritten. `scalars` are
        the parameter's before the step, and are not changed; None means that it was never stepped:
        then the contents of `states` don't matter, and the class sets their first values. (Scalars
        that are tensors are on the host, here and in what is returned.) `group` holds the options
        of now.

        Raises: SwapUsageError, before anything is changed, if the options need a state that is
        not among `states`.
        """
        proved = self._proved_for(group)
        self._check(proved.states, states.keys(), is_first=scalars is None)
        return self._step_piece(
            master, gradient, states, scalars, self._resolved(group), proved.on_device
        )

    def check(
        self, states: Collection[str], group: Mapping[str, Any], *, is_first: bool
    ) -> None:
        """Raise SwapUsageError if the options need a state that is not among `states`, or in a
        first step don't need one that is."""
        self._check(self.states_of(group), states, is_first=is_first)

    def _check(
        self, needed: Collection[str], states: Collection[str], *, is_first: bool
    ) -> None:
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
        new ones in tensors, which may have been on a GPU."""
        is_torchs = self._class.__module__.startswith("torch.optim")
        return {
            name: torch.tensor(float(value), device="cpu")
            if is_torchs and name == "step" and isinstance(value, (int, float))
            else _on_host(value)
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
        on_device: Collection[str],
    ) -> dict[str, Any]:
        kernel, first_scalars = self._kernel, FIRST_SCALARS.get(self._class)
        if (
            kernel is not None
            and (scalars is not None or first_scalars is not None)
            and options.get("fused")
            and not isinstance(options["lr"], Tensor)
        ):
            if scalars is None and first_scalars is not None:
                scalars = first_scalars()
                for state in states.values():
                    state.zero_()
            assert scalars is not None
            return kernel(master, gradient, states, scalars, options)
        piece = master.detach().requires_grad_()
        piece.grad = gradient
        optimizer = self._inner
        if scalars is None:  # some classes make the first state in their constructor
            optimizer = self._class([piece], **self._options)
        else:
            optimizer.state[piece] = {**states, **self._copied(scalars, on_device)}
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
            elif scalars is None:  # the class has put off making it
                memory.zero_()
        late = [n for n, v in after.items() if isinstance(v, Tensor) and v.numel() != 1]
        if late:
            raise SwapUsageError(
                f"{self._name} makes the state {late[0]} in a later step",
                cause="a parameter's states are laid out when the optimizer is built",
                intact="nothing: this step is half made",
                fix="load the last checkpoint, and use another optimizer",
            )
        return {name: _on_host(value) for name, value in after.items()}

    def _copied(self, scalars: Mapping[str, Any], on_device: Collection[str]) -> dict[str, Any]:
        """Where the class has them."""
        return {
            name: value.to(self._device if name in on_device else _CPU, copy=True)
            if isinstance(value, Tensor)
            else value
            for name, value in scalars.items()
        }

    def _is_fused_there(self) -> bool:
        """False where torch has no such kernel for the device, as for Adagrad on some."""
        if self._device.type == "cpu":
            return True
        parameter = blank(self._device)
        parameter.grad = blank(self._device)
        try:
            with random_state_left(self._device), torch.no_grad():
                _unhooked_step(self._class)(
                    self._class([parameter], **{**self._options, "fused": True})
                )
        except Exception:  # options that are wrong are so without it, too
            return False
        return True

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

    def _refuse_closures(self) -> None:
        _, *others = inspect.signature(self._step).parameters.values()
        if any(
            parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in others
        ):
            refuse(self._class, "its step() needs a closure")

    def _prove(self, options: dict[str, Any]) -> Proved:
        """What it keeps, if stepping whole and in pieces agree; else refuse."""
        for name in ("differentiable", "capturable"):
            if options.get(name):
                raise SwapUsageError(
                    f"{self._name}({name}=True) is not served",
                    cause="state that is swapped is updated outside of graphs",
                    fix=f"leave {name} out",
                )
        proved = self._try(options, PROOF_SHAPE)
        # Some classes treat matrices and convolutions' weights each in a way of their own.
        self._try(options, (*PROOF_SHAPE, 1, 1))
        return proved

    def _try(self, options: dict[str, Any], shape: tuple[int, ...]) -> Proved:
        try:
            return self._proof.run(options, shape, self._step_piece)
        except SwapUsageError:
            if self._kernel is None:
                raise
            self._kernel = None  # perhaps it is the kernel's fault, and not the class's
            return self._proof.run(options, shape, self._step_piece)


def _unhooked_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's `step` without the wrapper for hooks that torch's constructor puts round it."""
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _on_host(scalar: Any) -> Any:
    return scalar.to("cpu") if isinstance(scalar, Tensor) else scalar


def _kind(option: Any) -> Any:
    """What of an option's value may decide which states there are."""
    if option is None or isinstance(option, (int, str)):
        return option
    if isinstance(option, (tuple, list)):
        return tuple([_kind(part) for part in option])
    return bool(option.any() if isinstance(option, Tensor) else option)
