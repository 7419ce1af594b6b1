"""Host memory by a budget: what DeepSpeed's `buffer_count` and `buffer_size` mean here.

DeepSpeed takes `buffer_count` buffers of one size at the start, and stops when they are used up.
Here the same bytes are a limit: each tensor gets a buffer of its own size when it needs one.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref

import torch

from nvmeswap.errors import SwapClosedError, SwapForkError
from nvmeswap.io import Engine
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.memory.arena import Arena

_PAGE_NBYTES = 4096
# Less than a huge page is not worth an entry in the kernel's table of registered memory.
_REGISTERED_FROM_NBYTES = 2 << 20


class HostBuffer:
    """A lent piece of memory: `memory` is uint8, 4096-aligned, at least as large as asked for, its
    content undefined. Made by `HostBuffers`."""

    __slots__ = ("_arena", "_own_count", "memory", "nbytes")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.memory = arena.memory
        self.nbytes = arena.memory.nbytes
        self._own_count = self._user_count()

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Its first `numel` elements, as a flat tensor."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def is_viewed(self) -> bool:
        """Whether some tensor still shows its memory."""
        return self._user_count() > self._own_count

    def _user_count(self) -> int:
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count

    def close(self) -> None:
        """For `HostBuffers`: the memory goes when the last view of it does."""
        self._arena.close()
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostBuffers:
    """Lends buffers, `budget_nbytes` of them at most, and keeps what comes back for the next.

    The memory is never page-locked by CUDA: DeepSpeed gives a parameter's buffer back while its
    copy to the GPU may still be queued, which is safe for pageable memory alone (CUDA has copied
    that when the call returns).

    Args: `name`, for warnings, with the setting that makes the budget, `setting`.
    Threads: any. Blocking: only for populating memory, 0.13 s a GiB.
    """

    def __init__(self, budget_nbytes: int, *, engine: Engine, name: str, setting: str) -> None:
        self.budget_nbytes = budget_nbytes
        self._engine = engine
        self._name = name
        self._setting = setting
        self._lock = threading.RLock()
        self._idle: dict[int, list[HostBuffer]] = {}  # by size
        self._taken_nbytes = 0  # lent and idle
        self._idle_nbytes = 0
        self._has_warned = False
        self._registered: dict[int, torch.Tensor] = {}  # by address
        weakref.finalize(self, _unregister, engine, self._registered)

    @property
    def lent_nbytes(self) -> int:
        """In use now."""
        return self._taken_nbytes - self._idle_nbytes

    @property
    def left_nbytes(self) -> int:
        """What can still be lent within the budget; 0 at least."""
        return max(self.budget_nbytes - self.lent_nbytes, 0)

    def take(self, nbytes: int) -> HostBuffer | None:
        """A buffer for so many bytes, or None where the budget has not that much left."""
        size = padded_nbytes(max(nbytes, 1), _PAGE_NBYTES)
        with self._lock:
            if idle := self._idle.get(size):
                self._idle_nbytes -= size
                return idle.pop()
            if size > self.left_nbytes:
                return None
            self._drop_idle(size)
            return self._new(size)

    def take_beyond(self, nbytes: int) -> HostBuffer:
        """A buffer in any case, over the budget if need be; warns of that once."""
        buffer = self.take(nbytes)
        if buffer is not None:
            return buffer
        with self._lock:
            self._drop_idle(self.budget_nbytes)
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._name} need {self.lent_nbytes + nbytes:_} bytes of host memory at "
                    f"once, beyond the {self.budget_nbytes:_} that {self._setting} allow; they are "
                    "taken all the same",
                    ResourceWarning, stacklevel=2,
                )
            return self._new(padded_nbytes(max(nbytes, 1), _PAGE_NBYTES))

    def give_back(self, buffer: HostBuffer) -> None:
        """Its holder does not need it any more. Where somebody still has a view of it (DeepSpeed
        gathers in place where there is one rank and no GPU, and autograd may keep a view of a
        weight) it is never lent again: it counts no longer, and goes with the last view."""
        with self._lock:
            if buffer.is_viewed() or self._taken_nbytes > self.budget_nbytes:
                self._let_go(buffer)
                return
            self._idle.setdefault(buffer.nbytes, []).append(buffer)
            self._idle_nbytes += buffer.nbytes

    def close(self) -> None:
        """Lets go of what is idle. Lent buffers stay their holders'."""
        with self._lock:
            self._drop_idle(self.budget_nbytes)

    def _new(self, size: int) -> HostBuffer:
        buffer = HostBuffer(Arena(size, pin_memory=False))
        self._taken_nbytes += size
        if size >= _REGISTERED_FROM_NBYTES:
            self._registered[buffer.memory.data_ptr()] = buffer.memory
            self._engine.register_memory(buffer.memory)
        return buffer

    def _drop_idle(self, wanted_nbytes: int) -> None:
        """Until so many more bytes fit the budget; the largest first."""
        for size in sorted(self._idle, reverse=True):
            idle = self._idle[size]
            while idle and self._taken_nbytes + wanted_nbytes > self.budget_nbytes:
                self._idle_nbytes -= size
                self._let_go(idle.pop())

    def _let_go(self, buffer: HostBuffer) -> None:
        self._taken_nbytes -= buffer.nbytes
        memory = self._registered.pop(buffer.memory.data_ptr(), None)
        if memory is not None:
            _unregister(self._engine, {memory.data_ptr(): memory})
        buffer.close()


def _unregister(engine: Engine, memories: dict[int, torch.Tensor]) -> None:
    """Also of what is still lent when its `HostBuffers` are dropped: the engine is shared."""
    with contextlib.suppress(SwapClosedError, SwapForkError):  # it has let go of all memory then
        for memory in memories.values():
            engine.unregister_memory(memory)
    memories.clear()
