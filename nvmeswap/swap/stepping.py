"""The step of a swapped optimizer: parameters by key, their sub-groups updated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nvmeswap.errors import SwapClosedError, SwapError, SwapUsageError
from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.home import ParameterHome
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper, Ready
from nvmeswap.swap.overlap import BackwardOverlap
from nvmeswap.swap.states import OptimizerStates
from nvmeswap.swap.step import Step, check_options, options_now
from nvmeswap.swap.traffic import SubGroup
from nvmeswap.swap.update import Turn, Updater
from nvmeswap.swap.worker import Job


class SteppingOptimizer(Optimizer):
    """The base of `SwappedOptimizer`: what it updates, and how. `self.state` has only the scalars
    (step counts) of a parameter; its states are the swapper's."""

    _rule: ElementwiseOptimizer
    _home: ParameterHome
    _states: OptimizerStates
    _swapper: PipelinedOptimizerSwapper | None
    _state_dtype: torch.dtype
    _by_key: dict[str, torch.Tensor]
    # With what must not change: its states were laid out for it.
    _owned: dict[torch.Tensor, tuple[Any, ...]]
    # Parameters that have been updated: those with states. (A class may have no step count.)
    _started: set[str]
    _overlap: BackwardOverlap | None
    _step: Step | None
    _updater: Updater
    _scales: dict[str, torch.Tensor]  # of gradients, in the next step

    def _own(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self._by_key[self._home.key_of(parameter)] = parameter
            self._owned[parameter] = _kind(parameter)

    def key_of(self, parameter: torch.Tensor) -> str:
        """The name that its states are stored under."""
        return self._home.key_of(parameter)

    def parameter(self, key: str) -> torch.Tensor:
        """The parameter of that name."""
        return self._by_key[key]

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those that are updated, by key."""
        return self._by_key.items()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        After an error nothing is lost: the next call goes on with the sub-groups that are left.
        """
        if closure is not None:
            raise SwapUsageError(
                "step(closure) is not served",
                fix="compute the loss and call backward() before step()",
            )
        swapper, overlap = self._attached(), self._overlap
        if overlap is not None:
            overlap.refuse_grad_scaler()
        if self._home.is_alone:
            swapper.refuse_torn()
        is_new = self._step is None
        if is_new:
            self._begin_step(swapper)
        step = self._step
        assert step is not None
        error = None
        if overlap is not None:
            error = self._end_overlapped_pass(swapper, step, overlap)
        try:  # from here on other ranks wait for what became of it
            if error is not None:
                raise error
            swapper.refuse_torn()
            if not step.walked:
                if not is_new:
                    self._refuse_lost_gradients(swapper.keys_of(step.remaining) & step.expected)
                swapper.walk(self._visit, step.remaining, self._is_intact)
                step.walked = True
        except SwapError as failure:
            error = failure
        except Exception as failure:  # the user's class, or no memory: others wait all the same
            if self._home.is_alone:
                raise
            error = _told_to_peers(failure)
        try:
            self._home.after_step(error, is_final=swapper.is_torn)
        except SwapError:
            if self._home.step_is_lost:  # no other call can finish it, on any rank
                if not swapper.is_torn:
                    swapper.tear("another rank's states are of no use after a step that broke")
                self._forget_step()
            raise
        for key, scalars in step.after.items():
            self.state[self._by_key[key]] = scalars
        self._started |= step.after.keys()
        self._home.forget_edits(self._by_key[key] for key in step.after)
        self._forget_step()

    def _end_overlapped_pass(
        self, swapper: PipelinedOptimizerSwapper, step: Step, overlap: BackwardOverlap
    ) -> SwapError | None:
        """Backward is over: wait for the walk that began in it, and return what went wrong in it;
        raises if gradients were of no use that may have been used."""
        error = None
        try:
            if not overlap.finish():
                return None
            step.walked = not step.remaining
        except SwapError as failure:
            error = failure
        except Exception as failure:
            if self._home.is_alone:
                raise
            error = _told_to_peers(failure)
        try:
            self._home.end_overlapped_pass()
        except SwapError as failure:
            swapper.tear("updates had begun in a backward pass that failed")
            self._forget_step()
            try:
                swapper.refuse_torn()
            except SwapError as torn:
                raise torn from failure
        return error

    def start_step(
        self, order: Callable[[list[SubGroup]], list[int]], ready: Ready
    ) -> Job[None]:
        """Begin a step, over all parameters, whose gradients are still to come: for the overlap."""
        swapper = self._attached()
        error = None
        try:
            swapper.refuse_torn()
        except SwapError as failure:
            error = failure
        self._home.begin_overlapped_step(error)
        self._begin_step(swapper, order)
        assert self._step is not None
        return swapper.start_walk(self._visit, self._step.remaining, self._is_intact, ready)

    def _begin_step(
        self,
        swapper: PipelinedOptimizerSwapper,
        order: Callable[[list[SubGroup]], list[int]] | None = None,
    ) -> None:
        self._refuse_strangers()
        if order is None:
            self._home.before_step()
            self._gradients_are_agreed_on()
        options = options_now(self.param_groups, self._home.key_of)
        keys = {
            key
            for key, parameter in self._by_key.items()
            if key in options and (order is not None or self._home.has_gradient(parameter))
        }
        expected = set(keys) if order is None else set()
        before: dict[str, Mapping[str, Any] | None] = {
            key: dict(self.state[self._by_key[key]]) if key in self._started else None
            for key in keys
        }
        edits = {key: self._home.edited_values(self._by_key[key]) for key in keys}
        check_options(self._rule, swapper.item, before, options)
        remaining = swapper.order(keys) if order is None else order(swapper.groups_of(keys))
        self._step = Step(before, edits, options, expected, remaining)

    def _gradients_are_agreed_on(self) -> None:
        """A new step is to be made of them, on all ranks: for subclasses."""

    def _refuse_lost_gradients(self, needed: Iterable[str]) -> None:
        if not all(self._home.has_gradient(self._by_key[key]) for key in needed):
            raise SwapUsageError(
                "gradients were forgotten in the middle of a step that failed",
                fix="go back to a checkpoint; next time call step() again first",
            )

    def _visit(self, sub_group: SubGroup) -> bool:
        """Update what has a gradient in a sub-group that is in memory; True if anything has."""
        step = self._step
        assert step is not None
        turns = [
            (segment, turn)
            for segment in sub_group.layout.segments
            if (turn := self._turn(step, segment.key)) is not None
        ]
        if turns:
            step.after |= self._updater.update(
                sub_group.layout, sub_group.memory, turns, self._attached().breathe
            )
        for segment, turn in turns:
            if turn.in_place is None:
                self._states.publish_with(sub_group, segment)
        if self._overlap is not None:
            self._overlap.used(sub_group)
        return bool(turns)

    def _is_intact(self) -> bool:
        """After a visit that raised: nothing has changed."""
        return self._updater.left_intact

    def _turn(self, step: Step, key: str) -> Turn | None:
        if key not in step.before:
            return None
        parameter = self._by_key[key]
        gradient = self._home.gradient(parameter)
        if gradient is None:
            return None
        return Turn(
            gradient, self._scales.get(key), step.before[key], step.options[key], step.edits[key],
            self._home.in_place(parameter),
        )

    @property
    def home(self) -> ParameterHome:
        """Where its parameters and gradients are."""
        return self._home

    def expect_gradient(self, key: str, scale: torch.Tensor | None) -> None:
        """A gradient of the step under way is final; it is to be multiplied by `scale`."""
        assert self._step is not None
        self.scale_gradient(key, scale)
        self._step.expected.add(key)

    def scale_gradient(self, key: str, scale: torch.Tensor | None) -> None:
        """In the step under way, or else the next one."""
        if scale is not None:
            self._scales[key] = scale

    def _refuse_in_a_step(self, *, may_be_torn: bool = False) -> None:
        swapper = self._attached()
        if self._step is not None:
            raise SwapUsageError(
                "a step is unfinished: its state is of two steps", fix="call step() again first"
            )
        if not may_be_torn:
            swapper.refuse_torn()

    def _forget_step(self) -> None:
        if self._overlap is not None:
            self._overlap.abandon()
        self._step = None
        self._scales.clear()

    @property
    def step_is_unfinished(self) -> bool:
        """True if a step failed or was interrupted half-way: `step` must be called again, with the
        gradients as they are."""
        return self._step is not None

    def _refuse_strangers(self) -> None:
        """A parameter that was frozen when the optimizer was built has no state here."""
        for parameter, kind in self._owned.items():
            if _kind(parameter) != kind:
                raise SwapUsageError(
                    f"a parameter was changed from {kind} to {_kind(parameter)} (dtype, device, "
                    "shape, stride) after this optimizer was built",
                    fix="change it back, or build the optimizer anew",
                )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._owned and parameter.grad is not None:
                    raise SwapUsageError(
                        f"a parameter of shape {tuple(parameter.shape)} was frozen when this "
                        "optimizer was built, and has a gradient now",
                        fix="set requires_grad first, then build the optimizer",
                    )

    @property
    def swapper(self) -> PipelinedOptimizerSwapper:
        """The state's swapper."""
        return self._attached()

    @property
    def states(self) -> OptimizerStates:
        """Masters and states by the parameters' keys."""
        return self._states

    def _attached(self) -> PipelinedOptimizerSwapper:
        if self._swapper is None:
            raise SwapClosedError("this optimizer is closed", fix="build a new one")
        return self._swapper


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    return (parameter.dtype, parameter.device, tuple(parameter.shape), parameter.stride())


def _told_to_peers(failure: Exception) -> SwapError:
    error = SwapUsageError(f"the update raised {failure!r}", fix="see the cause, on this rank")
    error.__cause__ = failure
    return error
