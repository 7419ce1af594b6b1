"""Optimizer state, swapped by sub-groups in a pipeline: reading i+1, updating i, writing i-1.

The walk turns round each step, so the sub-groups that the last step left in memory are the first
that the next one needs. Sub-groups that can't be written stay in memory, DIRTY, and are written
again on the next occasion; a step that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from nvmeswap.errors import SwapError, SwapIOError, SwapTimeoutError, SwapUsageError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.engine import Lane
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.memory.pool import SLOT_ALIGNMENT_NBYTES, Pool, SlotClass
from nvmeswap.memory.slot import Slot
from nvmeswap.stats import OptimizerStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store, StoreRequest
from nvmeswap.swap.shard import Resident, ShardState
from nvmeswap.swap.sub_group import (
    STATE_DTYPE,
    Segment,
    StateItem,
    SubGroupLayout,
    cut_into_sub_groups,
)

OPTIMIZER_FILE = "optimizer.swp"


class SubGroup(Resident):
    """One sub-group: its layout, and its state as a resident."""

    __slots__ = ("index", "layout")

    def __init__(self, index: int, layout: SubGroupLayout) -> None:
        super().__init__(layout.key)
        self.index = index
        self.layout = layout

    @property
    def memory(self) -> torch.Tensor:
        assert self.slot is not None
        return self.slot.memory

    def state_of(self, segment: Segment, name: str) -> torch.Tensor:
        """The fp32 state `name` of a segment, flat [numel]; valid while the sub-group is in
        memory."""
        return segment.state(self.memory, name)

    def output_of(self, segment: Segment) -> torch.Tensor | None:
        """Where the new values of a segment go, flat [numel] of the shard's dtype, or None."""
        return segment.output(self.memory)


class PipelinedOptimizerSwapper:
    """fp32 optimizer state of many shards, in host memory a few sub-groups at a time.

        swapper = PipelinedOptimizerSwapper(layouts, store=store, pool=pool, timeout_s=60)
        swapper.initialise(lambda key, name, start, stop: initial values or None for zeros)
        remaining = swapper.order(lambda sub_group: True)
        swapper.walk(visit, remaining)   # visit updates sub_group.state_of(segment, "exp_avg") ...

    With `store=None` everything stays in `pool`, which then has a slot for each sub-group.

    Raises: SwapReadError or SwapWriteError naming the sub-group; after either, walking again goes
    on with the sub-groups that are left, and no update is lost or done twice.
    Blocking: all but `written_with`. Threads: one at a time (the training loop's).
    Ownership: the pool's slots are this object's; store and pool are closed by their owner.
    """

    def __init__(
        self,
        layouts: Sequence[SubGroupLayout],
        *,
        store: Store | None,
        pool: Pool | None,
        timeout_s: float,
    ) -> None:
        assert pool is not None or not layouts
        self._groups = [SubGroup(index, layout) for index, layout in enumerate(layouts)]
        self._pieces: dict[str, list[tuple[SubGroup, Segment]]] = {}
        for group in self._groups:
            for segment in group.layout.segments:
                self._pieces.setdefault(segment.key, []).append((group, segment))
        self._store = store
        self._pool = pool
        self._timeout_s = timeout_s
        self._backwards = False
        self._remaining: list[int] = []
        self._torn: str | None = None
        self._others: dict[int, list[Callable[[], list[StoreRequest]]]] = {}
        self._step_count = self._hit_count = 0
        self._step_s = self._stall_s = self._update_s = 0.0
        if store is not None and layouts:
            specs = {
                layout.key: TensorSpec(torch.uint8, (layout.state_nbytes,), (1,))
                for layout in layouts
            }
            store.create_file(OPTIMIZER_FILE, specs)

    @staticmethod
    def lay_out(items: Sequence[StateItem], sub_group_numel: int) -> list[SubGroupLayout]:
        """The sub-groups of at most `sub_group_numel` elements that `items` are cut into."""
        return cut_into_sub_groups(items, sub_group_numel)

    @staticmethod
    def slot_classes(
        layouts: Sequence[SubGroupLayout], buffer_count: int | None
    ) -> list[SlotClass]:
        """`buffer_count` slots of the largest sub-group; None: one for each (nothing is
        swapped)."""
        sizes = [layout.slot_nbytes for layout in layouts]
        if not sizes or buffer_count is None:
            return exact_slot_classes(sizes)
        count = min(buffer_count, len(sizes))
        return [SlotClass(padded_nbytes(max(sizes), SLOT_ALIGNMENT_NBYTES), count)]

    # --- a step -------------------------------------------------------------------------------

    def order(self, needed: Callable[[SubGroup], bool]) -> list[int]:
        """The sub-groups that the next walk is to visit, by index; the direction turns each
        time."""
        order = [group.index for group in self._groups if needed(group)]
        self._backwards = not self._backwards
        return order if self._backwards else order[::-1]

    def walk(self, visit: Callable[[SubGroup], None], remaining: list[int]) -> None:
        """Call `visit` for each sub-group in `remaining`, with its state in memory, and take it off
        the list; what the visitor left in the slot is written back behind it. Waits for the last
        write.

        Whatever interrupts a walk, calling it again with the same list goes on there. A visit that
        raised counts as not made: the state from before it is read again; where that can't be (a
        master that is the parameter itself), walking is refused from then on.
        """
        if self._torn is not None:
            raise SwapUsageError(
                f"{self._torn} was interrupted in the middle of an update that can't be undone",
                fix="go back to a checkpoint",
            )
        began = time.perf_counter()
        self._remaining = remaining
        while remaining:
            group = self._groups[remaining[0]]
            waited = time.perf_counter()
            self._hit_count += group.state in (ShardState.CLEAN, ShardState.WRITING)
            self._bring_in(group)
            self._read_ahead()
            computing = time.perf_counter()
            self._stall_s += computing - waited
            self._visit(group, visit)
            self._update_s += time.perf_counter() - computing
            self._write_back(group)
        waited = time.perf_counter()
        self.flush()
        ended = time.perf_counter()
        self._stall_s += ended - waited
        self._step_s += ended - began
        self._step_count += 1

    def _visit(self, group: SubGroup, visit: Callable[[SubGroup], None]) -> None:
        self._others.pop(group.index, None)
        group.move(ShardState.DIRTY)
        try:
            visit(group)
            self._remaining.pop(0)
        except BaseException:
            if self._remaining[:1] != [group.index]:
                raise  # interrupted behind the visit: it counts
            self._others.pop(group.index, None)
            if self._store is not None and group.layout.holds_masters:
                group.drop_slot()  # the state from before is on NVMe
            else:
                self._torn = group.key
            raise

    def written_with(self, group: SubGroup, write: Callable[[], list[StoreRequest]]) -> None:
        """Have `write` called whenever this visit's result is written back: it submits further
        writes from the sub-group's slot, which is held until they are done too."""
        self._others.setdefault(group.index, []).append(write)

    def flush(self) -> None:
        """Wait until every sub-group's newest bytes are on NVMe; raises the first write error."""
        for group in self._groups:
            if group.state is ShardState.DIRTY:
                self._write_back(group)
        for group in self._groups:
            if group.state is ShardState.WRITING:
                self._finish_writing(group)

    # --- single states ------------------------------------------------------------------------

    def initialise(self, source: Callable[[str, str, int, int], torch.Tensor | None]) -> None:
        """Write the first state of every sub-group, one after the other in order: for each key,
        state name, start and stop, `source` gives the values (any dtype and device) or None for
        zeros. At most the pool's slots are in memory."""
        for group in self._groups:
            group.slot = self._slot_for(group)
            group.move(ShardState.DIRTY)
            group.memory.zero_()
            for segment in group.layout.segments:
                for name in segment.offsets_bytes:
                    values = source(segment.key, name, segment.start, segment.stop)
                    if values is not None:
                        group.state_of(segment, name).copy_(values)
            self._write_back(group)
        self.flush()

    def read_state(self, key: str, name: str, numel: int) -> torch.Tensor:
        """A copy of one state of a shard, fp32, flat [numel], in host memory."""
        out = torch.zeros(numel, dtype=STATE_DTYPE)
        for group, segment in self._pieces.get(key, ()):
            if name in segment.offsets_bytes:
                self._bring_in(group)
                out[segment.start : segment.stop].copy_(group.state_of(segment, name))
        return out

    def write_state(self, key: str, values: Mapping[str, torch.Tensor]) -> None:
        """Replace states of a shard, by name, from flat tensors of any dtype; waits for the
        disk."""
        for group, segment in self._pieces.get(key, ()):
            self._bring_in(group)
            group.move(ShardState.DIRTY)
            for name, value in values.items():
                if name in segment.offsets_bytes:
                    flat = value.detach().reshape(-1)[segment.start : segment.stop]
                    group.state_of(segment, name).copy_(flat)
            self._write_back(group)
        self.flush()

    def has_state(self, key: str, name: str) -> bool:
        """True if the shard has a state of that name here."""
        return any(name in segment.offsets_bytes for _, segment in self._pieces.get(key, ()))

    def stats(self, gradient_nbytes: int = 0) -> OptimizerStats:
        """Counters since the start; `gradient_nbytes` is passed through."""
        return OptimizerStats(
            sub_group_count=len(self._groups),
            step_count=self._step_count,
            hit_count=self._hit_count,
            step_s=self._step_s,
            stall_s=self._stall_s,
            update_s=self._update_s,
            gradient_nbytes=gradient_nbytes,
        )

    # --- how ----------------------------------------------------------------------------------

    def _bring_in(self, group: SubGroup) -> None:
        """To CLEAN, whatever it takes. One left DIRTY by a failed write is written first."""
        if group.state is ShardState.DIRTY:
            self._write_back(group)
        if group.state is ShardState.WRITING:
            self._finish_writing(group)
        if group.state is ShardState.ON_NVME:
            slot = group.slot or self._slot_for(group)
            self._start_reading(group, slot, Lane.DEMAND)
        if group.state is ShardState.READING:
            group.finish_reading()
        assert group.state is ShardState.CLEAN, group.state

    def _read_ahead(self) -> None:
        """Start reading the sub-groups that come next, while slots can be had without waiting."""
        for index in self._remaining[1:]:
            group = self._groups[index]
            if group.state is not ShardState.ON_NVME:
                continue
            slot = group.slot or self._free_slot(group)
            if slot is None:
                return
            self._start_reading(group, slot, Lane.PREFETCH)

    def _start_reading(self, group: SubGroup, slot: Slot, lane: Lane) -> None:
        store = self._store
        assert store is not None
        memory = slot.memory[: group.layout.state_nbytes]
        group.start_reading(slot, lambda: store.read(group.key, memory, lane=lane))

    def _free_slot(self, group: SubGroup) -> Slot | None:
        """A slot without waiting: free, or that of a clean sub-group this step needs no more."""
        assert self._pool is not None
        nbytes = group.layout.slot_nbytes
        slot = self._pool.try_acquire(nbytes, holder=group.key)
        if slot is None:
            self._collect_writes()
            done = [
                other
                for other in self._groups
                if other.state is ShardState.CLEAN and other.index not in self._remaining
            ]
            if done:
                # The walk turns round: what was visited first in this step is needed last.
                # (`_backwards` is already the direction of the next walk.)
                first_visited = min if self._backwards else max
                first_visited(done, key=lambda other: other.index).drop_slot()
                slot = self._pool.try_acquire(nbytes, holder=group.key)
        return slot

    def _slot_for(self, group: SubGroup) -> Slot:
        """A slot now: without waiting if it can be had so, else that of the oldest write, else
        that of another sub-group in memory."""
        while (slot := self._free_slot(group)) is None:
            victim = self._victim(group)
            if victim is None:
                assert self._pool is not None
                self._pool.release_orphans([g.slot for g in self._groups if g.slot is not None])
                return self._pool.acquire(
                    group.layout.slot_nbytes, holder=group.key, timeout_s=self._timeout_s
                )
            if victim.state is ShardState.ON_NVME:  # its read was interrupted
                assert victim.slot is not None
                self._start_reading(victim, victim.slot, Lane.DEMAND)
            if victim.state is ShardState.DIRTY:
                self._write_back(victim)
            if victim.state is ShardState.WRITING:
                self._finish_writing(victim)
            if victim.state is ShardState.READING:
                try:
                    victim.finish_reading()
                except SwapIOError:
                    continue  # its slot is free now; it is read again when it is needed
            victim.drop_slot()
        return slot

    def _victim(self, group: SubGroup) -> SubGroup | None:
        """Who gives up its slot when nothing is free: writers first, then who is needed last."""
        held = [other for other in self._groups if other.slot is not None and other is not group]
        writing = [other for other in held if other.state is ShardState.WRITING]
        if writing:
            return writing[0]
        order = {index: place for place, index in enumerate(self._remaining)}
        return max(held, key=lambda other: order.get(other.index, len(order)), default=None)

    def _write_back(self, group: SubGroup) -> None:
        """DIRTY -> WRITING; or, where nothing is swapped, straight to CLEAN."""
        assert group.state is ShardState.DIRTY
        group.requests.clear()
        try:
            if self._store is not None:
                memory = group.memory[: group.layout.state_nbytes]
                group.requests.append(self._store.write(group.key, memory, lane=Lane.WRITEBACK))
            for write in self._others.get(group.index, ()):
                group.requests.extend(write())
        except BaseException:  # Ctrl-C too: what was not submitted must not pass for written
            self._settle(group)
            raise
        group.move(ShardState.WRITING)
        if not group.requests:
            self._finish_writing(group)

    def _collect_writes(self) -> None:
        for group in self._groups:
            if group.state is ShardState.WRITING and all(r.done() for r in group.requests):
                self._finish_writing(group)

    def _finish_writing(self, group: SubGroup) -> None:
        """WRITING -> CLEAN; on an error back to DIRTY with the data kept, and raise."""
        try:
            for request in group.requests:
                request.wait(self._timeout_s)
        except SwapTimeoutError:
            raise  # still under way: the slot must be kept, and waiting again is legal
        except SwapError:
            self._settle(group)
            group.move(ShardState.DIRTY)
            raise
        group.move(ShardState.CLEAN)
        self._others.pop(group.index, None)

    def _settle(self, group: SubGroup) -> None:
        """After a failure nothing of the write may be in flight before the slot may change
        again."""
        for request in group.requests:
            try:
                request.wait(self._timeout_s)
            except SwapError:
                continue  # the first error is the one that is raised
