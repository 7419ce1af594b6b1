"""What is swapped, and in which state it can be. Read this file first.

Vocabulary: a **shard** is one rank's flat part of a parameter; a **sub-group** is the optimizer
state of some shards (or pieces of them), read, updated and written together. Both are *residents*:
things whose home is an extent on NVMe and which hold a slot of host memory around their use.

A plan decides when they move, and never whether the result is right.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nvmeswap.errors import SwapError, SwapTimeoutError
from nvmeswap.memory.slot import Slot
from nvmeswap.store.store import StoreRequest

# Starts transfers.
Submit = Callable[[], list[StoreRequest]]


class ShardState(enum.Enum):
    """Where the newest bytes of a resident are, and who may touch its slot.

    | state   | newest bytes | slot | may write the slot |
    |---------|--------------|------|--------------------|
    | ON_NVME | extent       | none | nobody             |
    | READING | extent       | held | the engine         |
    | CLEAN   | both         | held | nobody             |
    | DIRTY   | slot         | held | its user           |
    | WRITING | slot         | held | nobody             |
    """

    ON_NVME = "on_nvme"
    READING = "reading"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


LEGAL_MOVES: dict[ShardState, frozenset[ShardState]] = {
    # swap_in | never stored, or just written whole
    ShardState.ON_NVME: frozenset({ShardState.READING, ShardState.CLEAN}),
    ShardState.READING: frozenset({ShardState.CLEAN, ShardState.ON_NVME}),  # done | error
    ShardState.CLEAN: frozenset({ShardState.DIRTY, ShardState.ON_NVME}),  # update | evict
    # swap_out | undo | nothing was changed
    ShardState.DIRTY: frozenset({ShardState.WRITING, ShardState.ON_NVME, ShardState.CLEAN}),
    ShardState.WRITING: frozenset({ShardState.CLEAN, ShardState.DIRTY}),  # done | error
}


@dataclass(eq=False, slots=True)
class Resident:
    """A thing with a home on NVMe: its key, its state, and its slot while it holds one.

    `requests` are the transfers in flight for it; `failure` is why its reads were not all started;
    `copied` is the event of the last GPU copy out of its memory. Not thread-safe: its swapper's
    lock guards it.
    """

    key: str
    state: ShardState = ShardState.ON_NVME
    slot: Slot | None = None
    requests: list[StoreRequest] = field(default_factory=list)
    failure: SwapError | None = None
    copied: torch.cuda.Event | None = None

    def move(self, to: ShardState) -> None:
        """Change the state while the slot stays."""
        assert to in LEGAL_MOVES[self.state], f"{self.key}: {self.state.name} -> {to.name}"
        assert (self.slot is None) == (to is ShardState.ON_NVME), f"{self.key}: slot in {to.name}"
        self.state = to

    def start_reading(self, slot: Slot, *reads: Submit) -> None:
        """ON_NVME -> READING, by the requests that `reads` submit. On an error before the first of
        them the slot is returned; one after it is for `finish_reading` to raise, because the disk
        may be writing to the slot already.

        The slot is ours before anything is submitted into it: whatever interrupts this, a slot that
        the disk may write to is never lent to another.
        """
        self.slot = slot
        for request in self.requests:  # an interrupted read must not land after what is read now
            request.settle()
        self.requests, self.failure = [], None
        for read in reads:
            try:
                self.requests += read()
            except SwapError as error:
                if not self.requests:
                    self.slot = None
                    slot.release()
                    raise
                self.failure = error
                break
        self.move(ShardState.READING)

    def finish_reading(self) -> None:
        """READING -> CLEAN; waits for all requests. On an error the slot is returned, when none of
        them is in flight any more, and the state is ON_NVME."""
        assert self.state is ShardState.READING
        failure = self.failure
        for request in self.requests:
            try:
                request.wait()
            except SwapTimeoutError:
                raise  # the transfer may still land in the slot: keep both, waiting again is legal
            except SwapError as error:
                failure = failure or error
        # Forgotten last: after Ctrl-C the next call finds out again how they ended.
        if failure is not None:
            self.drop_slot()
            self.requests = []
            raise failure
        self.move(ShardState.CLEAN)
        self.requests = []

    @property
    def has_been_read(self) -> bool:
        """Of one that is READING: whether `finish_reading` would not wait."""
        return all(request.done() for request in self.requests)

    def drop_slot(self) -> None:
        """To ON_NVME (evict, or a failed read); the slot is free again."""
        slot, copied = self.slot, self.copied
        assert slot is not None and ShardState.ON_NVME in LEGAL_MOVES[self.state]
        self.state, self.slot, self.copied = ShardState.ON_NVME, None, None
        if copied is None:
            slot.release()
        else:
            slot.release_after(copied)

    def copy_to(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values`, which lie in its memory, to `out`; on a GPU queued on the current
        stream."""
        if not out.is_cuda:
            out.copy_(values)
            return
        stream = torch.cuda.current_stream(out.device)
        if self.copied is not None:  # perhaps on another stream
            stream.wait_event(self.copied)
        out.copy_(values, non_blocking=True)
        self.copied = stream.record_event()

    def wait_for_copies(self) -> None:
        """Before its memory is written: GPU copies out of it must be over."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank's flat part of a parameter as it is stored: `numel` elements of `dtype`."""

    key: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ParamShard(Resident):
    """A shard of a parameter. `ram` is its values in host memory, None when its home is NVMe;
    `version` counts updates."""

    __slots__ = ("ram", "spec", "version")

    def __init__(self, spec: ShardSpec, ram: torch.Tensor | None) -> None:
        super().__init__(spec.key)
        self.spec = spec
        self.ram = ram
        self.version = 0

    @property
    def values(self) -> torch.Tensor:
        """The shard's elements in its slot."""
        assert self.state is ShardState.CLEAN and self.slot is not None
        return self.slot.memory[: self.spec.nbytes].view(self.spec.dtype)
