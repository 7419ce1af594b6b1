"""Who lends slots.

Rules that hold in every line here:
- the lock covers list operations only; CUDA is never called under it;
- waiters of a size class are served in the order they came, and `try_acquire`, which is what
  prefetch uses, gets only what no waiter needs: demand never starves behind prefetch;
- every slot is either free or lent, so `free_count + in_use_count == slot_count` always.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence

import torch

from nvmeswap.errors import SwapPoolTimeoutError, SwapUsageError
from nvmeswap.memory.slot import Slot, SlotClass
from nvmeswap.stats import PoolStats

__all__ = ["Pool", "Slot", "SlotClass"]

SLOT_ALIGNMENT_NBYTES = 4096
_EVENT_POLL_S = 0.0005  # arbitrary: below what a copy of 16 MiB takes


class _Shelf:
    """The slots of one size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = 0
        self.free: list[torch.Tensor] = []
        self.waiters: deque[object] = deque()


class Pool:
    """Lends aligned pieces of one tensor of memory, by size class.

        pool = Pool(arena.memory, [SlotClass(1 << 20, 4)], name="params")
        slot = pool.acquire(700_000, holder="layer 3", timeout_s=60.0)
        ...
        slot.release()

    Args: `memory`, uint8, contiguous, 4096-aligned, at least `nbytes_needed(classes)` long;
    `classes`, carved from it in this order; `name`, for messages.
    Blocking: only `acquire`. Threads: all calls from any thread.
    Ownership: the pool keeps `memory` alive; a slot's memory is its holder's until released.
    """

    def __init__(
        self, memory: torch.Tensor, classes: Sequence[SlotClass], *, name: str
    ) -> None:
        assert memory.dtype is torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        assert memory.numel() >= self.nbytes_needed(classes), "the memory is too small"
        assert memory.data_ptr() % SLOT_ALIGNMENT_NBYTES == 0
        self._name = name
        # Re-entrant, because the garbage collector may run a finalizer that releases a slot while
        # this very thread is inside the lock.
        self._lock = threading.RLock()
        # Entered as the lock: Ctrl-C in the Python of a Condition's own `with` would leave it held.
        self._changed = threading.Condition(self._lock)
        self._shelves = _carve(memory, classes)
        self._lent: dict[Slot, _Shelf] = {}
        self._awaited: dict[Slot, torch.cuda.Event] = {}
        self._wait_count = 0
        self._wait_s = 0.0

    @staticmethod
    def nbytes_needed(classes: Sequence[SlotClass]) -> int:
        """Bytes of memory that a pool of these classes takes."""
        return sum(each.nbytes * each.count for each in classes)

    @property
    def largest_nbytes(self) -> int:
        """The largest request that can be served; 0 for a pool without slots."""
        return self._shelves[-1].nbytes if self._shelves else 0

    def class_nbytes(self, nbytes: int) -> int:
        """Bytes of the slots that serve `nbytes`. Raises SwapUsageError for too large a size."""
        return self._shelf_for(nbytes).nbytes

    def try_acquire(self, nbytes: int, *, holder: str) -> Slot | None:
        """A slot of the smallest class that holds `nbytes`, or None if none of that class is free
        beyond those that waiters need. Never blocks. Raises SwapUsageError for too large a size."""
        shelf = self._shelf_for(nbytes)
        self._collect_finished()
        with self._lock:
            if len(shelf.free) <= len(shelf.waiters):
                return None
            return self._lend(shelf, holder)

    def acquire(self, nbytes: int, *, holder: str, timeout_s: float) -> Slot:
        """A slot of the smallest class that holds `nbytes`; waits for one up to `timeout_s`.

        Raises SwapPoolTimeoutError, which lists who holds the slots of that class, and
        SwapUsageError at once when `nbytes` exceeds `largest_nbytes`.
        """
        slot = self.try_acquire(nbytes, holder=holder)
        if slot is not None:
            return slot
        shelf = self._shelf_for(nbytes)
        ticket = object()
        begin = time.monotonic()
        try:
            with self._lock:
                shelf.waiters.append(ticket)
                self._wait_count += 1
            return self._wait_for_turn(shelf, ticket, holder, begin + timeout_s, nbytes)
        finally:
            with self._lock:
                if ticket in shelf.waiters:  # else Ctrl-C came before it was put there
                    shelf.waiters.remove(ticket)
                self._wait_s += time.monotonic() - begin
                self._changed.notify_all()

    def _wait_for_turn(
        self, shelf: _Shelf, ticket: object, holder: str, deadline: float, nbytes: int
    ) -> Slot:
        while True:
            self._collect_finished()
            with self._lock:
                if shelf.waiters.index(ticket) < len(shelf.free):
                    return self._lend(shelf, holder)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._timeout_error(shelf, nbytes)
                self._changed.wait(min(left_s, _EVENT_POLL_S) if self._awaited else left_s)

    def _timeout_error(self, shelf: _Shelf, nbytes: int) -> SwapPoolTimeoutError:
        holders = tuple(slot.holder for slot, lent in self._lent.items() if lent is shelf)
        return SwapPoolTimeoutError(
            f'pool "{self._name}": none of the {shelf.count} slots of {shelf.nbytes:_} bytes '
            "became free in time",
            wanted_nbytes=nbytes,
            holders=holders,
            fix='raise "buffer_count", or release slots before asking for more',
        )

    def release_orphans(self, known: Collection[Slot]) -> None:
        """Take back lent slots that are not in `known`: those that an exception (Ctrl-C) kept from
        reaching whoever asked for them, or from coming back. Only for a pool with one user."""
        with self._lock:
            for slot in [s for s in self._lent if s not in known and s not in self._awaited]:
                self._put_back(slot)

    def stats(self) -> PoolStats:
        """A consistent snapshot. `slot_nbytes` is the bytes of all slots together; a slot waiting
        for its event counts as in use."""
        with self._lock:
            return PoolStats(
                slot_count=sum(shelf.count for shelf in self._shelves),
                free_count=sum(len(shelf.free) for shelf in self._shelves),
                in_use_count=len(self._lent),
                slot_nbytes=sum(shelf.nbytes * shelf.count for shelf in self._shelves),
                wait_count=self._wait_count,
                wait_s=self._wait_s,
            )

    def take_back(self, slot: Slot) -> None:
        """`Slot.release`."""
        with self._lock:
            assert slot not in self._awaited, f"slot of {slot.holder} released twice"
            self._put_back(slot)

    def take_back_after(self, slot: Slot, event: torch.cuda.Event) -> None:
        """`Slot.release_after`."""
        with self._lock:
            assert slot in self._lent, f"slot of {slot.holder} released twice"
            assert slot not in self._awaited, f"slot of {slot.holder} released twice"
            self._awaited[slot] = event
            self._changed.notify_all()  # a waiter must begin to poll

    def _shelf_for(self, nbytes: int) -> _Shelf:
        for shelf in self._shelves:
            if shelf.nbytes >= nbytes:
                return shelf
        raise SwapUsageError(
            f'pool "{self._name}" has no slot that large',
            wanted_nbytes=nbytes,
            got_nbytes=self.largest_nbytes,
            fix="move it in pieces of at most the pool's largest slot",
        )

    def _lend(self, shelf: _Shelf, holder: str) -> Slot:
        # Between the two changes here and in `_put_back` there is no call: Ctrl-C can't come there.
        slot = Slot(shelf.free[-1], holder=holder, lender=self)
        self._lent[slot] = shelf
        del shelf.free[-1]
        return slot

    def _put_back(self, slot: Slot) -> None:
        shelf, memory = self._lent.get(slot), slot.memory
        assert shelf is not None, f"slot of {slot.holder} released twice"
        del self._lent[slot]
        shelf.free += [memory]
        self._changed.notify_all()

    def _collect_finished(self) -> None:
        with self._lock:
            awaited = list(self._awaited.items())
        for slot, event in awaited:
            if event.query():
                with self._lock:
                    # Another thread may have asked the same event and been faster.
                    if self._awaited.pop(slot, None) is not None:
                        self._put_back(slot)


def _carve(memory: torch.Tensor, classes: Sequence[SlotClass]) -> list[_Shelf]:
    shelves: dict[int, _Shelf] = {}
    start = 0
    for each in classes:
        assert each.nbytes > 0 and each.nbytes % SLOT_ALIGNMENT_NBYTES == 0, each
        assert each.count > 0, each
        shelf = shelves.setdefault(each.nbytes, _Shelf(each.nbytes))
        shelf.count += each.count
        for _ in range(each.count):
            shelf.free.append(memory[start : start + each.nbytes])
            start += each.nbytes
    for shelf in shelves.values():
        shelf.free.reverse()  # lent from the end: neighbours in memory go out in order
    return sorted(shelves.values(), key=lambda shelf: shelf.nbytes)
