"""Forward and backward passes: which calls use which units, from when to when.

Facts (torch 2.11 and 2.13). A forward hook with `always_call` also runs when forward raises, with
None as its output; when Ctrl-C ends it, no hook runs, and what a call took is found by its frame,
which is no caller of the next one. While a backward pass runs, recomputation for
`torch.utils.checkpoint` is a forward like any other. Full backward hooks are of no use: they wrap
outputs, miss dicts, and fire before the backward of modules whose inputs need no gradient; a hook
on the node that made an output fires just before that node.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from nvmeswap.errors import SwapError, SwapUsageError
from nvmeswap.offload import saved
from nvmeswap.offload.block import Mover
from nvmeswap.offload.borrowed import BorrowedWeights, enter, is_compiled, leave
from nvmeswap.offload.results import nodes_of, tensors_in
from nvmeswap.offload.window import Unit, Window

_AUTOGRAD_FILE = "torch/autograd/graph.py"  # where Python waits for a backward pass
_MODULE_FILE = "torch/nn/modules/module.py"
_EARLY_STOP = getattr(checkpoint, "_StopRecomputationError", ())


@dataclass(eq=False, slots=True)
class _Call:
    """A module's forward under way. `handled`: the exception that was being handled before it."""

    module: nn.Module
    frame: FrameType
    units: list[Unit]
    pushed: bool
    handled: BaseException | None


class PassEvents:
    """What its owner does at the borders of passes."""

    def begin_forward(self, module: nn.Module) -> None:
        """A module is called, outside of backward and of other calls. May raise."""

    def end_forward(self, *, has_graph: bool) -> None:
        """It has returned; without a graph nothing will come back for its units."""

    def begin_backward(self) -> None:
        """The first sign of a backward pass."""

    def end_backward(self) -> None:
        """A backward pass is over, and so is the use of all units."""

    def fail(self) -> None:
        """An exception leaves the outermost call, or has ended a backward pass."""


class Passes:
    """Follows the calls of a model's modules. `needs`: the units that a module's forward uses.

    Threads: calls are followed a thread at a time; the window is guarded by `lock`.
    """

    def __init__(
        self,
        root: nn.Module,
        needs: Mapping[nn.Module, Sequence[Unit]],
        window: Window,
        mover: Mover,
        events: PassEvents,
        lock: threading.RLock,
    ) -> None:
        self._root = root
        self._needs = dict(needs)
        self._window = window
        self._mover = mover
        self._events = events
        self._lock = lock
        self._calls = _Calls()
        self._task: int | None = None  # the outermost backward pass that was seen
        self._held_by_nodes: dict[tuple[int, Unit], Any] = {}
        self._handles: list[Any] = []
        self._busy_thread: int | None = None
        self._units_by_tensor = {
            id(managed.tensor): unit for unit in window.units for _, managed in unit.tensors
        }
        self._learned: set[nn.Module] = set()  # modules whose borrowed weights are known
        self._lender = BorrowedWeights(self._lend)
        self._enter = torch.compiler.disable(self._entered)
        self._leave = torch.compiler.disable(self._left)

    def follow_all(self) -> None:
        """Hook the root, and all modules that need units."""
        for module in {self._root: None, **self._needs}:
            self.follow(module)

    def follow(self, module: nn.Module, units: Sequence[Unit] = ()) -> None:
        """Hook a module; `units` are those that it needs beside what it is known to."""
        if units:
            known = self._needs.get(module)
            self._needs[module] = list(dict.fromkeys([*(known or ()), *units]))
            if known is not None or module is self._root:
                return
        enter, leave = _Hook(self._enter), _Hook(self._leave)
        self._handles.append(
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        )
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def unfollow(self) -> None:
        """Take every hook away; idempotent."""
        self.forget_stale_calls()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def units_below(self, module: nn.Module) -> list[Unit]:
        """The units that the modules below it need, in their order."""
        needed = (self._needs.get(each, ()) for each in module.modules())
        return list(dict.fromkeys(chain.from_iterable(needed)))

    @property
    def is_idle(self) -> bool:
        """Whether no call of this thread and no backward is under way."""
        self.forget_stale_calls()
        if self._calls.stack or saved.current_task() is not None:
            return False
        return not self._other_thread_runs()

    # --- forward ----------------------------------------------------------------------------------

    def _entered(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.forget_stale_calls()
        stack = self._calls.stack
        is_outermost = not stack
        with self._lock:
            if saved.current_task() is not None:
                self._see_backward(is_outermost=False)
            elif is_outermost:
                self._begin_outermost(module)
            units = self._needs.get(module, ())
            call = _Call(module, _caller(), [], False, sys.exc_info()[1])
            try:
                for unit in units:
                    self._window.hold(unit)
                    call.units.append(unit)
                call.pushed = self._push_hooks()
            except BaseException:
                self._let_go(call, has_run=False)
                raise
            stack.append(call)
            if is_outermost and saved.current_task() is None:
                self._begin_to_learn(module)
        return self._moved(args, kwargs) if is_outermost else None

    # --- weights that are used without a call of their module -------------------------------------

    def _begin_to_learn(self, module: nn.Module) -> None:
        if module not in self._learned and not is_compiled(module):
            enter(self._lender)

    def _end_learning(self, module: nn.Module, *, has_failed: bool) -> None:
        leave(self._lender)
        if has_failed:
            self._learned.discard(module)  # perhaps it took a way that was not seen yet
        else:
            self._learned.add(module)

    def _lend(self, tensor: torch.Tensor) -> None:
        """A torch function is given this tensor."""
        unit = self._units_by_tensor.get(id(tensor))
        stack = self._calls.stack
        if unit is None or unit.holds or not stack:
            return
        with self._lock:
            call = stack[-1]
            self._window.hold(unit)
            call.units.append(unit)
            self._needs[call.module] = [*self._needs.get(call.module, ()), unit]

    # --- the ends of calls ------------------------------------------------------------------------

    def _begin_outermost(self, module: nn.Module) -> None:
        self._refuse_other_thread()
        while saved.pop(self._needed_in_backward):  # what Ctrl-C left
            pass
        leave(self._lender)
        self._busy_thread = threading.get_ident()
        if self._held_by_nodes or self._task is not None:  # a backward that an error has ended
            self._abandon_backward()
        self._events.begin_forward(module)

    def _refuse_other_thread(self) -> None:
        if self._other_thread_runs():
            raise SwapUsageError(
                "another thread is running this model", fix="let one thread at a time use it",
            )

    def _other_thread_runs(self) -> bool:
        """Whether a forward, or a backward that uses units, is under way in another thread."""
        me, busy = threading.get_ident(), self._busy_thread
        frames = {t: frame for t, frame in sys._current_frames().items() if t != me}
        if busy in frames and _has_frame(frames[busy], file=_MODULE_FILE):
            return True
        in_backward = self._task is not None and saved.current_task() is None
        return in_backward and any(
            _has_frame(frame, file=_AUTOGRAD_FILE) for frame in frames.values()
        )

    def _push_hooks(self) -> bool:
        if saved.are_allowed():
            return saved.push(self._needed_in_backward)
        if torch.is_grad_enabled():
            raise SwapUsageError(
                "torch.func's transforms can't differentiate a model whose weights come and go",
                fix="use torch.autograd, or close() the manager first",
            )
        return False

    def _moved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments of the outermost call, on the device, if none of them is there: where some are,
        the others (lengths, say) are meant to be where they are."""
        device = self._mover.device
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        if not tensors or any(t.device.type == device.type for t in tensors):
            return None

        def move(given: Any) -> Any:
            return given.to(device) if isinstance(given, torch.Tensor) else given

        return tuple(map(move, args)), {name: move(given) for name, given in kwargs.items()}

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._calls.stack
        if not stack or stack[-1].module is not module:
            return  # an earlier hook raised before ours was entered
        error = sys.exc_info()[1]
        with self._lock:
            call = stack.pop()
            has_failed = error is not None and error is not call.handled
            if not stack and saved.current_task() is None:
                self._end_learning(module, has_failed=has_failed)
            nodes = [] if has_failed else nodes_of(output)
            for unit in () if has_failed else self._units_shown(output):
                if stack:  # who gets it has it until it has returned as well
                    self._window.hold(unit)
                    stack[-1].units.append(unit)
                else:
                    unit.is_given_away = True
            self._let_go(call, has_run=True)
            for node in nodes:
                self._follow_node(node, call)
            if stack or saved.current_task() is not None:
                return
            self._busy_thread = None
            if has_failed and not isinstance(error, _EARLY_STOP):
                self._events.fail()
            else:
                self._events.end_forward(has_graph=bool(nodes))

    def _units_shown(self, output: Any) -> set[Unit]:
        """Whose weights, or views of them, are among a module's results."""
        found = (self._unit_of(tensor) for tensor in tensors_in(output))
        return {unit for unit in found if unit is not None}

    def _unit_of(self, tensor: torch.Tensor) -> Unit | None:
        try:
            return self._window.unit_of(tensor.untyped_storage())
        except NotImplementedError:  # a tensor without memory
            return None

    def _let_go(self, call: _Call, *, has_run: bool) -> None:
        if call.pushed:
            call.pushed = False
            saved.pop(self._needed_in_backward)
        error: SwapError | None = None
        nothing_is_saved = not torch.is_grad_enabled() and saved.current_task() is None
        while call.units:
            try:
                self._window.let_go(
                    call.units.pop(), has_run=has_run, may_be_shown=nothing_is_saved
                )
            except SwapError as failure:
                error = error or failure
        if error is not None:
            raise error

    def forget_stale_calls(self) -> None:
        """Calls that Ctrl-C ended: they have no frame below us any more."""
        stack = self._calls.stack
        while stack and not _is_running(stack[-1].frame):
            with self._lock:
                self._let_go(stack.pop(), has_run=True)

    # --- backward ---------------------------------------------------------------------------------

    def _follow_node(self, node: Any, call: _Call) -> None:
        """Have the call's units when the backward of what it returned begins."""
        is_root = call.module is self._root
        units = list(self._needs.get(call.module, ()))
        if not units and not is_root:
            return

        def begins(gradients: Any) -> None:
            with self._lock:
                self._see_backward(is_outermost=is_root)
                for unit in units:
                    self._window.use_in_backward(unit)

        node.register_prehook(begins)

    def _needed_in_backward(self, tensor: torch.Tensor) -> None:
        """Backward takes this out of what was saved, for the node that computes next."""
        unit = self._unit_of(tensor)
        if unit is None:
            return
        with self._lock:
            self._see_backward(is_outermost=False)
            self._window.use_in_backward(unit)
            node = saved.current_node()
            if node is not None and (id(node), unit) not in self._held_by_nodes:
                self._window.hold(unit)
                # With create_graph the node's own computation is saved, too.
                pushed = torch.is_grad_enabled() and self._push_hooks()
                self._held_by_nodes[id(node), unit] = node.register_hook(
                    self._releaser(node, unit, pushed=pushed)
                )

    def _releaser(self, node: Any, unit: Unit, *, pushed: bool) -> Callable[..., None]:
        key = (id(node), unit)

        def has_computed(*gradients: Any) -> None:
            if pushed:
                saved.pop(self._needed_in_backward)
            with self._lock:
                handle = self._held_by_nodes.pop(key, None)
                if handle is not None:
                    handle.remove()
                    self._window.let_go(unit, has_run=False)

        return has_computed

    def _see_backward(self, *, is_outermost: bool) -> None:
        """The first sign of a backward pass: be told of its end. Passes inside one (reentrant
        checkpoints) end with it, unless the outer one is not known."""
        task = saved.current_task()
        if task is None or task == self._task or (self._task is not None and not is_outermost):
            return
        self._task = task
        self._events.begin_backward()

        def is_over() -> None:
            with self._lock:
                if self._task == task:
                    self._task = None
                    self._events.end_backward()

        saved.at_end_of_backward(is_over)

    def _abandon_backward(self) -> None:
        self._task = None
        for handle in self._held_by_nodes.values():
            handle.remove()
        self._held_by_nodes.clear()
        self._window.reset()
        self._events.fail()

    def abandon(self) -> None:
        """Whatever an exception left half done: nobody uses anything any more."""
        self.forget_stale_calls()
        while saved.pop(self._needed_in_backward):
            pass
        with self._lock:
            if self._held_by_nodes or self._task is not None:
                self._abandon_backward()


class _Calls(threading.local):
    """The calls under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


class _Hook:
    """A hook that a copy of its module does not have."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return (_as_nothing, ())


def _nothing(*args: Any) -> None:
    """A hook that does nothing."""


def _as_nothing() -> Callable[..., None]:
    return _nothing


def _caller() -> FrameType:
    """The frame of the module call that our hook is in, or the outermost one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.endswith(_MODULE_FILE):
        frame = frame.f_back
    return frame


def _has_frame(frame: FrameType | None, *, file: str) -> bool:
    while frame is not None and not frame.f_code.co_filename.endswith(file):
        frame = frame.f_back
    return frame is not None


def _is_running(wanted: FrameType) -> bool:
    """Whether it is one of our callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
