"""Gradients leave the device as backward makes them, and are added up in host memory.

Facts (torch 2.11 and 2.13). A hook on a parameter runs before its gradient is added to `grad`, one
after accumulation once it was. Setting `parameter.data` to memory of another device makes autograd
forget the node that accumulates: a parameter whose unit came twice in one pass gets its gradient in
two parts, where torch adds them up first.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nvmeswap.memory.arena import Arena
from nvmeswap.offload.block import ManagedTensor, Mover
from nvmeswap.offload.layout import own_storage
from nvmeswap.offload.saved import current_task
from nvmeswap.offload.window import Unit, Window

# Arbitrary: enough that small ones are copied behind the computation. A larger one is waited for,
# a millisecond for 64 MiB, so that there is never a second one on the device.
_MOST_ON_THEIR_WAY_NBYTES = 32 << 20


@dataclass(eq=False, slots=True)
class _Record:
    """A trained parameter. `is_held`: its unit, for the user's hooks. `held`: the sum of earlier
    passes; `part`: of this one, which is `task`; `memories`, page-locked: for gradients from a
    GPU."""

    unit: Unit
    managed: ManagedTensor
    is_held: bool = False
    memories: list[torch.Tensor] = field(default_factory=list)
    held: torch.Tensor | None = None
    part: torch.Tensor | None = None
    task: int | None = None
    handles: list[Any] = field(default_factory=list)


class GradientTraffic:
    """Watches trained parameters that are not on the device between uses.

    Threads: the manager's lock, `lock`, guards it. Ownership: a gradient in host memory is the
    user's; its memory is used again once nobody shows it.
    """

    def __init__(
        self, mover: Mover, window: Window, *, pin_memory: bool, lock: threading.RLock
    ) -> None:
        self._mover = mover
        self._window = window
        self._pin_memory = pin_memory
        self._lock = lock
        self._records: dict[int, _Record] = {}
        self._touched: dict[int, _Record] = {}  # since the last `finish`
        # Each gradient is held until it is copied: its memory is free for the next at once then.
        self._on_their_way: deque[tuple[torch.cuda.Event, _Record, torch.Tensor]] = deque()
        self._on_their_way_nbytes = 0
        self._arenas: list[Arena] = []

    def watch(self, trained: list[tuple[Unit, ManagedTensor]]) -> None:
        """From now on their gradients leave the device."""
        # Weakly: the garbage collector does not see what a tensor's hooks refer to.
        comes, came = weakref.WeakMethod(self._comes), weakref.WeakMethod(self._came)
        for unit, managed in trained:
            tensor = managed.tensor
            record = self._records[id(tensor)] = _Record(unit, managed)
            record.handles = [
                tensor.register_hook(partial(_call, comes, id(tensor))),
                tensor.register_post_accumulate_grad_hook(partial(_call, came, id(tensor))),
            ]

    @property
    def host_nbytes(self) -> int:
        """Of page-locked memory for gradients."""
        return sum(arena.nbytes for arena in self._arenas)

    def _take_memory(self) -> None:
        """Room for one more gradient of each."""
        sizes = [record.managed.place.span_nbytes + 255 & ~255 for record in self._records.values()]
        arena = Arena(sum(sizes), pin_memory=True)
        self._arenas.append(arena)
        begin = 0
        for record, nbytes in zip(self._records.values(), sizes, strict=True):
            place = record.managed.place
            memory = own_storage(arena.memory[begin : begin + place.span_nbytes])
            record.memories.append(
                torch.empty(0, dtype=place.dtype, device="cpu").set_(
                    memory, 0, place.shape, place.stride
                )
            )
            begin += nbytes

    # --- in backward ------------------------------------------------------------------------------

    def _comes(self, key: int, gradient: torch.Tensor) -> None:
        """Before it is accumulated: what is held must not be on another device."""
        with self._lock:
            record = self._records[key]
            tensor = record.managed.tensor
            if self._mover.on_gpu:
                self._touched[id(tensor)] = record
                if tensor.grad is not None:
                    record.held = tensor.grad
                    tensor.grad = None
            if _comes_last(record) and not record.is_held:
                self._touched[key] = record
                self._window.hold(record.unit, is_planned=False)
                record.is_held = True
                self._show_sum(record)

    def _show_sum(self, record: _Record) -> None:
        """For the user's hooks `grad` is what it would be without us, beside its parameter."""
        if self._mover.on_gpu:
            self._add_up(record)
            held, record.held = record.held, None
            if held is not None:
                record.managed.tensor.grad = held.to(self._mover.device)

    def _came(self, key: int, tensor: torch.Tensor) -> None:
        with self._lock:
            record = self._records[key]
            if record.is_held:
                record.managed.version = -1  # the user's hooks may have changed it, however
                record.is_held = False
                self._window.let_go(record.unit, has_run=False)
            gradient = tensor.grad
            if gradient is None or not gradient.is_cuda:
                return
            tensor.grad = None
            task = current_task()
            if record.part is not None and record.task != task:
                self._add_up(record)
            record.task = task
            if record.part is None:
                record.part = self._to_host(record, gradient)
            else:
                self._arrive(record)
                record.part = record.part + gradient.to("cpu")

    def _to_host(self, record: _Record, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            return gradient.to("cpu")
        # Once for the first gradients, and once more when they are accumulated.
        if self._pin_memory and len(self._arenas) < (1 if record.held is None else 2):
            self._take_memory()
        free = [memory for memory in record.memories if _is_free(memory)]
        if not free or gradient.stride() != free[0].stride():
            self._mover.out_nbytes += gradient.nbytes
            return gradient.to("cpu")
        host = free[0].detach()
        with self._mover.behind_current_stream() as stream:
            host.copy_(gradient, non_blocking=True)
            self._on_their_way.append((stream.record_event(), record, gradient))
        self._on_their_way_nbytes += gradient.nbytes
        self._mover.out_nbytes += gradient.nbytes
        # The host is ahead of the GPU: without this all gradients would be on the device together.
        while self._on_their_way_nbytes > _MOST_ON_THEIR_WAY_NBYTES:
            self._oldest_arrives()
        return host

    def _arrive(self, record: _Record) -> None:
        """Wait for the copies of this one, and of those before."""
        while any(each is record for _, each, _ in self._on_their_way):
            self._oldest_arrives()

    def _oldest_arrives(self) -> None:
        event, _, gradient = self._on_their_way.popleft()
        event.synchronize()
        self._on_their_way_nbytes -= gradient.nbytes

    def _add_up(self, record: _Record) -> None:
        """The part of a pass is whole: add it to what is held."""
        part, record.part = record.part, None
        if part is None:
            return
        self._arrive(record)
        if record.held is None:
            record.held = part
        else:
            with torch.no_grad():
                record.held.add_(part)

    def finish(self) -> None:
        """Backward is over and parameters show their homes: `grad` has what came. Waits for copies
        under way."""
        with self._lock:
            touched, self._touched = self._touched, {}
            for record in touched.values():
                if record.is_held:  # torch.autograd.grad calls the first of the two hooks alone
                    record.is_held = False
                    self._window.let_go(record.unit, has_run=False)
                    self._window.release_all()
                self._add_up(record)
                tensor = record.managed.tensor
                if record.held is not None and tensor.grad is None:
                    tensor.grad = record.held
                record.held = None

    def forget_pass(self) -> None:
        """Backward has failed: what came of it is not part of any gradient, nor is what was hidden
        meanwhile, for all that is known of it (the user may have set it to None)."""
        with self._lock:
            for record in self._records.values():
                self._arrive(record)
                record.part = record.held = None
                record.is_held = False
            self._touched = {}

    def close(self) -> None:
        """Watch nothing any more."""
        self.finish()
        for record in self._records.values():
            for handle in record.handles:
                handle.remove()
        self._records.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def _call(method: weakref.WeakMethod[Callable[..., None]], key: int, tensor: torch.Tensor) -> None:
    found = method()
    if found is not None:
        found(key, tensor)


def _comes_last(record: _Record) -> bool:
    """Whether others have hooks after accumulation: ours is to be behind them, and while they run
    the parameter is where its gradient is, so that an optimizer in backward works."""
    tensor = record.managed.tensor
    hooks = tensor._post_accumulate_grad_hooks
    if hooks is None or len(hooks) < 2:
        return False
    handle = record.handles[1]
    if next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)
    return True


def _is_free(memory: torch.Tensor) -> bool:
    """Whether nobody but its record shows this memory."""
    count: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return count <= 2  # the tensor, and the object that asks
