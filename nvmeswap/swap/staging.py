"""Tensors on a GPU to NVMe and back, through a few slots.

    tensor on the GPU  -- copy -->  slot  -- write, checksum -->  drive
    tensor on the GPU  <-- copy --  slot  <-- checksum, read --   drive

Copies are queued on the caller's current stream, so they come in the order of what the caller does
with the tensors, as any operation on them would, and memory freed before or afterwards needs no
further care. The host waits for single events: before a slot that was copied to is written, and
before one that was copied from is lent again.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from nvmeswap.errors import SwapError, SwapTimeoutError, SwapUsageError
from nvmeswap.io.digest import CHUNK_NBYTES
from nvmeswap.io.engine import Direction, Lane
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.device_arena import DeviceArena
from nvmeswap.memory.pool import Pool, Slot, SlotClass
from nvmeswap.store.store import Store, StoreBatch, StoreRequest
from nvmeswap.swap.layout import PLAIN_TYPES
from nvmeswap.swap.space import PoolRequest, SwapSpace, fit
from nvmeswap.swap.transit import Piece, Transit, packed

STAGED_DEVICE_TYPES = frozenset({"cuda"})
# A slot is as long as what has one checksum at most. So many that one is copied from and another
# is summed up while those on the drive fill its queue (32 blocks of 1 MiB).
SLOTS = SlotClass(CHUNK_NBYTES, 8)
_SPIN_S = 0.0001  # a copy of 4 MiB; most are over sooner
_POLL_S = 0.0001  # arbitrary: below what a slot takes on the drive
_device_of = attrgetter("device")


@dataclass(eq=False, slots=True)
class _Load:
    """A slot that is lent, and what is in it."""

    slot: Slot
    pieces: list[Piece]
    memories: list[torch.Tensor]
    copied: torch.cuda.Event | None = None
    moving: StoreBatch | StoreRequest | None = None

    @property
    def names(self) -> list[str]:
        return [piece.transit.name for piece in self.pieces]


@dataclass(slots=True)
class _Slots:
    memory: Arena | DeviceArena
    pool: Pool


class Staging:
    """Moves tensors on one kind of device between their memory and the store of `space`.

    The slots are taken at the first tensor, out of `host_memory_nbytes`: 8 of 8 MiB, or as many as
    there is room for. With `space.uses_gds` there are as many on each GPU, which the drive is read
    to and written from; pieces of odd length pass through those on the host, and all of them where
    a GPU has no room for slots.
    Raises: SwapBudgetError, if there is no room for one slot.
    Blocking: `write` and `read`, for the drive; copies to a GPU may go on, on the current stream.
    Threads: one at a time. Ownership: of the slots, until `close`, which comes after the engine's.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._slots: dict[torch.device, _Slots] = {}
        self._lent: dict[Slot, _Load] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._was_cut_short = False
        self._without_room: set[torch.device] = set()

    def write(self, device: torch.device, transits: Iterable[Transit]) -> dict[str, SwapError]:
        """Write tensors of one device to their names, which lie in one file; returns what went
        wrong, by key. Raises SwapTimeoutError, and what `transits` does.

        A tensor larger than a slot is written part by part: nothing must have been written under
        its name, or a call that is cut short would leave parts of two."""
        failures: dict[str, SwapError] = {}
        copied: deque[_Load] = deque()
        writing: deque[_Load] = deque()

        def begin(load: _Load) -> None:
            self._copy_in(load)
            copied.append(load)
            if len(copied) > 1:  # one is copied while the one before it is written
                advance()

        def advance() -> bool:
            if copied:
                writing.append(self._move(Direction.WRITE, copied.popleft()))
            elif writing:
                self._finish(writing.popleft(), failures)
            else:
                return False
            return True

        self._walk(device, transits, begin, advance, failures)
        return failures

    def read(self, device: torch.device, transits: Iterable[Transit]) -> dict[str, SwapError]:
        """Fill tensors of one device with what is stored; returns what went wrong, by key. The
        others are complete in the order of the current stream. Raises SwapUsageError for what was
        never written, SwapTimeoutError, and what `transits` does."""
        failures: dict[str, SwapError] = {}
        reading: deque[_Load] = deque()

        def begin(load: _Load) -> None:
            reading.append(self._move(Direction.READ, load))

        def advance() -> bool:
            if not reading:
                return False
            self._arrive(reading.popleft(), failures)
            return True

        self._walk(device, transits, begin, advance, failures)
        return failures

    def _walk(
        self, device: torch.device, transits: Iterable[Transit], begin: Callable[[_Load], None],
        advance: Callable[[], bool], failures: dict[str, SwapError],
    ) -> None:
        """Begins with slot after slot; `advance` brings the oldest one on, as long as there is
        any."""
        self._begin(device)
        try:
            for is_aligned, pieces in self._packed(device, transits):
                if pieces[0].transit.key not in failures:  # else: an earlier part of the same
                    begin(self._take_slot(device, pieces, is_aligned, advance))
        except SwapTimeoutError:
            raise
        except SwapError:  # a wrong call: what came before it is served
            while advance():
                pass
            self._end()
            raise
        while advance():
            pass
        self._end()

    def close(self) -> None:
        """Wait for copies out of slots, and give the memory back. May be repeated; raises
        SwapTimeoutError with it still taken."""
        if self._was_cut_short:
            self._wait_for(self._record())
        self._lent.clear()  # the engine is closed
        for slots in self._slots.values():
            slots.pool.release_orphans(())
            for _ in range(slots.pool.stats().slot_count):  # when all can be had nobody has one
                slots.pool.acquire(1, holder="close", timeout_s=self._space.timeout_s)
        while self._slots:
            self._slots.popitem()[1].memory.close()

    @property
    def slot_nbytes(self) -> int:
        """What is larger is moved part by part."""
        return SLOTS.nbytes

    # --- slots --------------------------------------------------------------------------------

    def _begin(self, device: torch.device) -> None:
        if self._was_cut_short:
            self._recover()
        self._was_cut_short = True  # until it was not
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _end(self) -> None:
        self._was_cut_short = bool(self._lent)

    def _recover(self) -> None:
        """After a call that Ctrl-C or a timeout ended: takes back the slots that nothing moves."""
        self._wait_for(self._record())
        for slots in self._slots.values():
            slots.pool.release_orphans(self._lent)
        for load in list(self._lent.values()):
            if all(each.done() for each in self._requests(load)):
                self._settle(load)

    def _requests(self, load: _Load) -> list[StoreRequest]:
        """What may still use its slot."""
        if load.moving is None:  # Ctrl-C: perhaps the engine has it, and the store was not told
            self._wait_until(self._is_idle, "what Ctrl-C left behind")
        return self._store.in_flight(load.names)

    def _settle(self, load: _Load) -> None:
        for each in self._requests(load):
            each.settle()
        self._release(load)

    def _is_idle(self) -> bool:
        assert self._space.engine is not None
        return self._space.engine.stats().in_flight_count == 0

    def _take_slot(
        self, device: torch.device, pieces: list[Piece], is_aligned: bool,
        advance: Callable[[], bool],
    ) -> _Load:
        """A slot for these pieces; while none is free `advance` brings others on."""
        pool = self._pool(device, is_aligned)
        take = partial(pool.try_acquire, SLOTS.nbytes, holder=pieces[0].transit.key)
        while (slot := take()) is None:
            if not advance():
                slot = self._wait_for_slot(pool, pieces[0].transit.key)
                break
        memories = [slot.memory[each.place : each.place + each.nbytes] for each in pieces]
        load = self._lent[slot] = _Load(slot, pieces, memories)
        return load

    def _wait_for_slot(self, pool: Pool, key: str) -> Slot:
        """This call has none: copies of an earlier one have, or transfers it could not wait for."""
        for load in list(self._lent.values()):
            self._settle(load)
        return pool.acquire(SLOTS.nbytes, holder=key, timeout_s=self._space.timeout_s)

    def _pool(self, device: torch.device, is_aligned: bool) -> Pool:
        if is_aligned and self._space.uses_gds and device.type == "cuda":
            if device not in self._slots and device not in self._without_room:
                self._take_slots_on(device)
            if device in self._slots:
                return self._slots[device].pool
        host = torch.device("cpu")
        if host not in self._slots:
            pin_memory, name = device.type == "cuda", "tensors on a GPU"
            asked = {name: PoolRequest([SLOTS])}
            request = fit(asked, self._space.budget_nbytes, pin_memory=pin_memory)[name]
            memory = Arena(request.nbytes, pin_memory=pin_memory)
            self._slots[host] = self._carved(memory, request, is_registered=pin_memory)
        return self._slots[host].pool

    def _take_slots_on(self, device: torch.device) -> None:
        """Where it has no room for them there are none, after one warning."""
        request = PoolRequest([SLOTS])
        try:
            try:
                memory = DeviceArena(request.nbytes, device)
            except SwapUsageError:
                torch.cuda.empty_cache()  # torch keeps what it has freed
                memory = DeviceArena(request.nbytes, device)
        except SwapUsageError as error:
            self._without_room.add(device)
            warnings.warn(
                f"{device} has no room for {request.nbytes:_} bytes of slots ({error.cause}): its "
                "tensors go through slots in host memory, and use_gds is without effect for them",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._slots[device] = self._carved(memory, request, is_registered=True)

    def _carved(
        self, memory: Arena | DeviceArena, request: PoolRequest, *, is_registered: bool
    ) -> _Slots:
        if self._space.engine is not None and is_registered:
            self._space.engine.register_memory(memory.memory)
        return _Slots(memory, Pool(memory.memory, request.classes, name="tensors on a GPU"))

    def _release(self, load: _Load, copied: torch.cuda.Event | None = None) -> None:
        del self._lent[load.slot]  # first: then it is an orphan, if Ctrl-C comes
        if copied is None:
            load.slot.release()
        else:
            load.slot.release_after(copied)

    # --- moves --------------------------------------------------------------------------------

    def _packed(
        self, device: torch.device, transits: Iterable[Transit]
    ) -> Iterator[tuple[bool, list[Piece]]]:
        uses_gds = self._space.uses_gds and device.type == "cuda"
        return packed(transits, SLOTS.nbytes, self._store.alignment_nbytes, is_split=uses_gds)

    def _copy_in(self, load: _Load) -> None:
        """Queues the copies into a slot."""
        with torch.no_grad():
            sources = [piece.bytes_of(Direction.WRITE) for piece in load.pieces]
            torch._foreach_copy_(load.memories, sources, non_blocking=True)
        load.copied = self._record()

    def _move(self, direction: Direction, load: _Load) -> _Load:
        """Starts to write what is in a slot, or to read into it."""
        if load.copied is not None:
            self._wait_for(load.copied)
        store, first = self._store, load.pieces[0]
        if first.nbytes < first.transit.nbytes:
            move = store.write if direction is Direction.WRITE else store.read
            load.moving = move(
                first.transit.name, load.memories[0], lane=Lane.DEMAND, first_byte=first.first_byte
            )
        else:
            move_many = store.write_many if direction is Direction.WRITE else store.read_many
            load.moving = move_many(load.names, load.memories, lane=Lane.DEMAND)
        return load

    def _finish(self, load: _Load, failures: dict[str, SwapError]) -> None:
        """Waits until a slot was written."""
        assert load.moving is not None
        for index, error in load.moving.failed().items():
            failures.setdefault(load.pieces[index].transit.key, error)
        self._release(load)

    def _arrive(self, load: _Load, failures: dict[str, SwapError]) -> None:
        """Waits until a slot was read, and queues the copies out of it."""
        assert load.moving is not None
        for index, error in load.moving.failed().items():
            failures.setdefault(load.pieces[index].transit.key, error)
        good = [
            (piece, memory)
            for piece, memory in zip(load.pieces, load.memories, strict=True)
            if piece.transit.key not in failures
        ]
        with torch.no_grad():
            if good:
                pieces, memories = zip(*good, strict=True)
                targets = [piece.bytes_of(Direction.READ) for piece in pieces]
                torch._foreach_copy_(targets, list(memories), non_blocking=True)
            for piece, _ in good:
                if piece.is_last:
                    piece.transit.complete()
        self._release(load, self._record())

    def _record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait_for(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            self._wait_until(copied.query, "a copy from or to a GPU")

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        begin_s = time.monotonic()
        while not is_over():
            waited_s = time.monotonic() - begin_s
            if waited_s > self._space.timeout_s:
                raise SwapTimeoutError(
                    f"{what} was not over within {self._space.timeout_s} s",
                    cause="it waits for what was queued before it, or hangs",
                    fix='raise "timeout_s", or see `dmesg` for the state of GPU and drive',
                )
            if waited_s > _SPIN_S:
                time.sleep(_POLL_S)

    @property
    def _store(self) -> Store:
        if self._space.store is None:
            raise SwapUsageError("this swapper is closed", fix="open a new one")
        return self._space.store


def by_device(
    keys: Sequence[str], tensors: Sequence[torch.Tensor]
) -> dict[torch.device, dict[str, torch.Tensor]]:
    """Those that go through slots."""
    staged: dict[torch.device, dict[str, torch.Tensor]] = {}
    if any(is_staged_on(device) for device in set(map(_device_of, tensors))):
        for key, tensor in zip(keys, tensors, strict=True):
            if is_staged(tensor):
                staged.setdefault(tensor.device, {})[key] = tensor
    return staged


def is_staged_on(device: torch.device) -> bool:
    return device.type in STAGED_DEVICE_TYPES


def is_staged(tensor: torch.Tensor) -> bool:
    """Whether it goes through slots. What is no plain tensor goes through the host's memory."""
    return (
        is_staged_on(tensor.device)
        and type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )
