"""Updates during backward: a sub-group is updated as soon as its gradients are final.

Backward runs in the caller's thread and tells of each gradient through a hook; the sub-groups are
walked on the swapper's thread, in the order in which the last backward finished them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.swap.gradients import norm_of
from nvmeswap.swap.traffic import SubGroup
from nvmeswap.swap.worker import Job

if TYPE_CHECKING:
    from nvmeswap.swap.swapped import SwappedOptimizer

_POLL_S = 0.1  # arbitrary: how soon a walk that waits for gradients sees that it is to stop


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """`SwappedOptimizer(..., overlap=OverlapSettings())`: update during backward.

    `gradient_accumulation_steps`: backward passes that make one step; gradients are final in the
    last of them. `clip_norm`: each parameter's gradient is clipped to this norm on its own, because
    the norm over all of them is known only when it is too late. Learning rates and other options
    are those of the moment when the first gradient is final. Parameters in memory: for one process,
    because with several ranks gradients would be used before they are reduced. After an error in
    backward call `step()`, or load the optimizer's state before the model's: both wait until
    nothing is being updated.
    """

    gradient_accumulation_steps: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        clips = self.clip_norm is not None
        if self.gradient_accumulation_steps < 1 or (clips and not float(self.clip_norm or 0) > 0):
            raise SwapConfigError(
                f"{self} makes no sense",
                key="overlap",
                fix="at least one accumulation step, and a positive norm",
            )


class BackwardOverlap:
    """The step of an optimizer, begun during backward.

    An error in the walk is raised by `step()`. `parameter.grad` is given up once it has been used.
    Threads: hooks run where backward does, the walk on the swapper's, all else in the training
    loop's.
    """

    def __init__(
        self,
        optimizer: SwappedOptimizer,
        settings: OverlapSettings,
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._home = optimizer.home
        self._settings = settings
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._lock = threading.RLock()  # of what follows
        self._changed = threading.Condition(self._lock)
        self._final: dict[str, int] = {}  # key -> its place in the order of arrival
        self._queued: dict[str, torch.cuda.Event] = {}  # after the last use in backward, on a GPU
        self._all_queued: torch.cuda.Event | None = None  # after all of backward
        self._unused: Counter[str] = Counter()  # key -> how many sub-groups still need its gradient
        self._all_final = False
        self._pass_count = 0
        self._pass: int | None = None  # autograd's number of the one under way
        self._job: Job[None] | None = None
        self._last_order: dict[str, int] = {}
        # How often backward tells of each gradient, in the last pass of this step and of the last.
        self._times: Counter[str] = Counter()
        self._last_times: Counter[str] = Counter()
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for the gradients of these, too."""
        arrived = weakref.WeakMethod(self._arrived)  # a parameter must not keep its optimizer

        def tell(parameter: torch.Tensor) -> None:
            method = arrived()
            if method is not None:
                method(parameter)

        for parameter in parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(tell))

    def refuse_grad_scaler(self) -> None:
        """Raise if torch.amp.GradScaler calls this step."""
        if hasattr(self._optimizer, "found_inf"):
            for name in ("found_inf", "grad_scale"):
                delattr(self._optimizer, name)
            self.refuse_scaled_gradients()

    def refuse_scaled_gradients(self) -> NoReturn:
        """Raise, here and in all that follows: nobody has unscaled before the updates."""
        what = "GradScaler does not go with updates during backward, before it has unscaled"
        self._give_up(what)
        raise SwapUsageError(
            what,
            intact="nothing: parameters may have been updated with scaled gradients",
            fix="load the last checkpoint, parameters included; train in bfloat16 without "
            "scaling, or don't overlap",
        )

    def _give_up(self, why: str) -> None:
        """From here on all is refused, and on return nothing is being updated: a checkpoint can be
        loaded."""
        self._optimizer.swapper.tear(why)  # first: also if Ctrl-C ends the wait
        if self._job is not None:
            self._job.stop()

    def finish(self) -> bool:
        """No more gradients will come: wait for the walk, if there is one (else False); raises
        once what went wrong in it."""
        with self._lock:
            if not self._all_final:  # these came in earlier passes than the last
                for key, parameter in self._optimizer.parameters():
                    if key not in self._final:
                        self._optimizer.scale_gradient(key, self._scale(parameter))
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self._all_queued = torch.cuda.Event()
                self._all_queued.record()
            self._all_final = True
            self._last_times = self._times or self._last_times
            self._changed.notify_all()
        if self._job is None:
            return False
        try:
            self._job.wait()
        finally:
            self._job = None
        return True

    def abandon(self) -> None:
        """Forget the step, and the passes made for it; wait until its walk has stopped."""
        job, self._job = self._job, None
        if job is not None and not job.is_over():
            job.stop()
        with self._lock:
            self._last_order = self._final or self._last_order
            self._final, self._unused, self._queued = {}, Counter(), {}
            self._times = Counter()
            self._all_queued = None
            self._all_final = False
            self._pass_count, self._pass = 0, None

    def close(self) -> None:
        """Hear of no more gradients."""
        for hook in self._hooks:
            hook.remove()
        self.abandon()

    # --- in backward --------------------------------------------------------------------------

    def _arrived(self, parameter: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            self._pass_count += 1
        if self._pass_count < self._settings.gradient_accumulation_steps:
            return
        self._home.has_gradient(parameter)  # or it is refused
        key = self._home.key_of(parameter)
        self._times[key] += 1
        if not self._home.gradient_comes_once:
            usual = self._last_times.get(key)
            if usual is None or self._times[key] < usual:
                return  # there may be more
        if key in self._final or self._pass_count > self._settings.gradient_accumulation_steps:
            what = f"a gradient of shape {tuple(parameter.shape)} came after its update had begun"
            self._give_up(what)
            raise SwapUsageError(
                what,
                intact="nothing: some parameters have been updated",
                fix="load the last checkpoint, parameters included; tell OverlapSettings how many "
                "backward passes make a step, call step() after the last, and use "
                "checkpoint(..., use_reentrant=False)",
            )
        if self._job is None:
            self._job = self._optimizer.start_step(self._in_expected_order, self._ready)
        self._optimizer.expect_gradient(key, self._scale(parameter))
        with self._lock:
            if parameter.is_cuda:  # the gradient is not there yet, but queued
                self._queued[key] = torch.cuda.Event()
                self._queued[key].record()
            self._final[key] = len(self._final)
            self._changed.notify_all()

    def _scale(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self._settings.clip_norm is None or not self._home.has_gradient(parameter):
            return None
        gradient = self._home.gradient(parameter)
        assert gradient is not None
        norm = norm_of(gradient, 2.0)
        return torch.clamp(self._settings.clip_norm / (norm + 1e-6), max=1.0).cpu()

    def _in_expected_order(self, groups: list[SubGroup]) -> list[int]:
        """As the last backward finished them; the first time, from the last parameter to the
        first."""
        self._unused = Counter(s.key for group in groups for s in group.layout.segments)
        last = len(self._last_order)

        def when(group: SubGroup) -> int:
            return max(self._last_order.get(each.key, last) for each in group.layout.segments)

        return [group.index for group in sorted(reversed(groups), key=when)]

    # --- on the swapper's thread --------------------------------------------------------------

    def used(self, group: SubGroup) -> None:
        """A sub-group has been updated: gradients that no other needs are given up."""
        for segment in group.layout.segments:
            self._unused[segment.key] -= 1
            if self._unused[segment.key] == 0 and segment.key in self._final:
                self._home.forget_gradient(self._optimizer.parameter(segment.key))

    def _ready(self, group: SubGroup, stopped: Callable[[], bool]) -> None:
        keys = {segment.key for segment in group.layout.segments}
        with self._lock:
            while not (self._all_final or keys <= self._final.keys() or stopped()):
                self._changed.wait(_POLL_S)
            queued = [self._queued.get(key, self._all_queued) for key in keys]
        for event in queued:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
