"""Optimizer state, swapped by sub-groups in a pipeline: reading i+1, updating i, writing i-1.

The walk turns round each step, so the sub-groups that the last step left in memory are the first
that the next one needs. A step that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from nvmeswap.errors import SwapBudgetError, SwapUsageError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.memory.pool import SLOT_ALIGNMENT_NBYTES, Pool, SlotClass
from nvmeswap.stats import OptimizerStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store
from nvmeswap.swap.shard import ShardState, Submit
from nvmeswap.swap.sub_group import (
    SEGMENT_GRAIN_NUMEL,
    Segment,
    StateItem,
    SubGroupLayout,
    cut_into_sub_groups,
)
from nvmeswap.swap.traffic import ReadOutputs, SubGroup, SubGroupTraffic
from nvmeswap.swap.worker import Job, Worker
from nvmeswap.timeline import Timeline

OPTIMIZER_FILE = "optimizer.swp"
DEFAULT_BUFFER_COUNT = 4
# True if the visit changed what is in the slot.
Visit = Callable[[SubGroup], bool]
# After a visit that raised: True if the slot and all else are as before it.
IsIntact = Callable[[], bool]
# Waits until a sub-group may be visited, or the second argument says that the walk is to stop.
Ready = Callable[[SubGroup, Callable[[], bool]], None]


def kept_count(layouts: Sequence[SubGroupLayout], ratio: float) -> int:
    """How many sub-groups stay in memory where the share `ratio` is swapped (DeepSpeed's rule)."""
    return len(layouts) - int(ratio * len(layouts))


def in_ram_count(
    layouts: Sequence[SubGroupLayout], ratio: float, *, slot_count: int, buffer_count: int
) -> int:
    """How many sub-groups have a slot for good: those that `ratio` keeps and what slots beyond the
    pipeline's have room for, so that one at least is left for the others."""
    count, kept = len(layouts), kept_count(layouts, ratio)
    if kept < count <= slot_count and slot_count > buffer_count:
        return count  # a budget with room for all
    if kept < count:
        return min(max(kept, slot_count - buffer_count), max(0, slot_count - 1))
    return kept


def stays_in_ram(index: int, count: int, kept_count: int) -> bool:
    """Whether a sub-group of `count` is one of the `kept_count`, which are evenly spread."""
    return (index + 1) * kept_count // count > index * kept_count // count


class PipelinedOptimizerSwapper:
    """Optimizer state of many shards, in host memory a few sub-groups at a time.

        swapper = PipelinedOptimizerSwapper(layouts, store=store, pool=pool, timeout_s=60)
        swapper.initialise(visit)        # fills in the masters
        remaining = swapper.order(keys)
        swapper.walk(visit, remaining)   # visit updates segment.state(sub_group.memory, name) ...

    Of the pool's slots `buffer_count` serve the pipeline; what is more keeps sub-groups in memory
    for good, evenly spread over the walk, all but the share `ratio` at least. With `store=None` all
    of them are.

    Raises: SwapReadError or SwapWriteError naming the sub-group; after either, walking again goes
    on with the sub-groups that are left, and no update is lost or done twice.
    Blocking: all but `start_walk` and `written_with`. Threads: visits run on a thread of this
    object's; calls come from one at a time (the training loop's).
    Ownership: the pool's slots are this object's; store and pool are closed by their owner.
    """

    def __init__(
        self,
        layouts: Sequence[SubGroupLayout],
        *,
        store: Store | None,
        pool: Pool | None,
        timeout_s: float,
        buffer_count: int = DEFAULT_BUFFER_COUNT,
        ratio: float = 1.0,
        thread_count: int = 1,
    ) -> None:
        assert pool is not None or not layouts
        self._store = store
        self._pool = pool
        self._buffer_count = buffer_count
        self._groups: list[SubGroup] = []
        self._pieces: dict[str, list[tuple[SubGroup, Segment]]] = {}
        self._traffic = SubGroupTraffic(self._groups, store=store, pool=pool, timeout_s=timeout_s)
        self._worker = Worker(thread_count)
        self._backwards = False
        self._torn: str | None = None
        self._step_count = self._hit_count = 0
        self._step_s = self._stall_s = self._update_s = 0.0
        slot_count = 0 if pool is None else pool.stats().slot_count
        kept = len(layouts) if store is None else in_ram_count(
            layouts, ratio, slot_count=slot_count, buffer_count=buffer_count
        )
        self._add(layouts, kept=kept)

    @staticmethod
    def lay_out(items: Sequence[StateItem], sub_group_numel: int) -> list[SubGroupLayout]:
        """The sub-groups of at most `sub_group_numel` elements that `items` are cut into."""
        return cut_into_sub_groups(items, sub_group_numel)

    @staticmethod
    def slot_classes(layouts: Sequence[SubGroupLayout], slot_count: int | None) -> list[SlotClass]:
        """`slot_count` slots of the largest sub-group; None: one for each (nothing is swapped)."""
        sizes = [max(1, layout.slot_nbytes) for layout in layouts]
        if not sizes or slot_count is None:
            return exact_slot_classes(sizes)
        count = min(slot_count, len(sizes))
        return [SlotClass(padded_nbytes(max(sizes), SLOT_ALIGNMENT_NBYTES), count)]

    def add(self, items: Sequence[StateItem], sub_group_numel: int) -> range:
        """More sub-groups, all swapped, of at most so many elements and as large as the slots
        allow; returns their indices. Where all slots are taken for good, some that have one are
        swapped from now on. Raises SwapBudgetError, SwapSpaceError with everything as it was."""
        first = len(self._groups)
        layouts = cut_into_sub_groups(items, sub_group_numel, first_index=first)
        largest = max((layout.slot_nbytes for layout in layouts), default=0)
        available = 0 if self._pool is None or self._store is None else self._pool.largest_nbytes
        if largest > available:
            if sub_group_numel > SEGMENT_GRAIN_NUMEL:
                return self.add(items, sub_group_numel // 2)
            raise SwapBudgetError(
                "optimizer state: the memory taken at the start is too small for this group",
                wanted_nbytes=largest,
                available_nbytes=available,
                smallest_nbytes=largest,
                fix="give all groups to the constructor",
            )
        if layouts:
            self._worker.call(lambda: self._add(layouts, kept=0))
        return range(first, first + len(layouts))

    def _add(self, layouts: Sequence[SubGroupLayout], *, kept: int) -> None:
        count, first = len(layouts), len(self._groups)
        groups = []
        for i, layout in enumerate(layouts):
            stays = stays_in_ram(i, count, kept)
            groups.append(SubGroup(first + i, layout, in_ram=stays))
        leaving = self._those_to_leave_ram()
        specs = {
            group.key: TensorSpec(torch.uint8, (group.layout.state_nbytes,), (1,))
            for group in (*groups, *leaving)
            if group in leaving or not group.in_ram
        }
        if specs:
            assert self._store is not None
            self._store.allocate_many(OPTIMIZER_FILE, specs)
        for group in leaving:
            group.leave_ram()
        self._groups += groups
        for group in groups:
            for segment in group.layout.segments:
                self._pieces.setdefault(segment.key, []).append((group, segment))

    def _those_to_leave_ram(self) -> list[SubGroup]:
        """Who must give up a slot so that the pipeline has some."""
        in_ram = [group for group in self._groups if group.in_ram]
        slot_count = 0 if self._pool is None else self._pool.stats().slot_count
        kept_count = max(0, slot_count - self._buffer_count)
        return in_ram[kept_count:]

    def item(self, key: str) -> StateItem | None:
        """How a shard is laid out; None for an empty or unknown one."""
        pieces = self._pieces.get(key)
        return pieces[0][1].item if pieces else None

    # --- a step -------------------------------------------------------------------------------

    def order(self, keys: Collection[str]) -> list[int]:
        """The sub-groups that have to do with any of these shards, by index, in the order of the
        next walk: the direction turns each time."""
        order = [group.index for group in self.groups_of(keys)]
        self._backwards = not self._backwards
        return order if self._backwards else order[::-1]

    def groups_of(self, keys: Collection[str]) -> list[SubGroup]:
        """The sub-groups that have to do with any of these shards."""
        return [
            group
            for group in self._groups
            if any(segment.key in keys for segment in group.layout.segments)
        ]

    def keys_of(self, indices: Iterable[int]) -> set[str]:
        """The shards in these sub-groups."""
        return {s.key for index in indices for s in self._groups[index].layout.segments}

    def walk(
        self, visit: Visit, remaining: list[int], is_intact: IsIntact = lambda: False
    ) -> None:
        """Call `visit` for each sub-group in `remaining`, with its state in memory, and take it off
        the list; what the visitor left in the slot is written back behind it. Waits for the last
        write.

        Whatever interrupts a walk, calling it again with the same list goes on there. A visit that
        raised counts as not made: where it left something changed (`is_intact` tells), the state
        from before it is read again; where that can't be (what it updates in place), walking is
        refused from then on.
        """
        self.start_walk(visit, remaining, is_intact).wait()

    def start_walk(
        self,
        visit: Visit,
        remaining: list[int],
        is_intact: IsIntact = lambda: False,
        ready: Ready | None = None,
    ) -> Job[None]:
        """As `walk`, but returns at once; `ready` is called before each visit and waits until that
        may be made, while the state is being read already."""
        self.refuse_torn()
        return self._worker.start(
            lambda job: self._walk(visit, remaining, is_intact, ready, job),
            is_behind=ready is not None,
        )

    def _walk(
        self,
        visit: Visit,
        remaining: list[int],
        is_intact: IsIntact,
        ready: Ready | None,
        job: Job[None],
    ) -> None:
        began = time.perf_counter()
        traffic = self._traffic

        def stopped() -> bool:
            traffic.breathe()
            return job.stop_asked

        traffic.remaining, traffic.turned = remaining, not self._backwards
        while remaining and not job.stop_asked:
            group = self._groups[remaining[0]]
            waited = time.perf_counter()
            in_memory = group.state in (ShardState.CLEAN, ShardState.WRITING)
            self._hit_count += in_memory and (group.in_ram or group.stored_nbytes > 0)
            traffic.bring_in(group)
            traffic.read_ahead()
            computing = time.perf_counter()
            self._stall_s += computing - waited
            if ready is not None:
                ready(group, stopped)
                if job.stop_asked:
                    break
                began += time.perf_counter() - computing
                computing = time.perf_counter()
            changed = self._visit(group, visit, is_intact)
            remaining.pop(0)
            updated = time.perf_counter()
            self._update_s += updated - computing
            if traffic.timeline is not None:
                traffic.timeline.add("wait", group.key, waited, computing)
                traffic.timeline.add("update", group.key, computing, updated)
            if changed:
                traffic.write_back(group)
        waited = time.perf_counter()
        traffic.flush()
        ended = time.perf_counter()
        self._stall_s += ended - waited
        if traffic.timeline is not None:
            traffic.timeline.add("wait", "flush", waited, ended)
        self._step_s += ended - began
        self._step_count += not remaining

    def _visit(
        self, group: SubGroup, visit: Visit, is_intact: IsIntact = lambda: False
    ) -> bool:
        group.move(ShardState.DIRTY)
        try:
            changed = visit(group)
        except BaseException:
            group.owed.clear()
            if is_intact():
                group.move(ShardState.CLEAN)
            elif group.can_be_undone:
                group.drop_slot()  # the state from before is on NVMe
            else:
                self.tear(f"the update of {group.key} was interrupted and can't be undone")
            raise
        if not changed:
            group.move(ShardState.CLEAN)
        return changed

    def breathe(self) -> None:
        """For visits, now and then: keeps the drive busy meanwhile."""
        self._traffic.breathe()

    @staticmethod
    def written_with(group: SubGroup, write: Submit) -> None:
        """Have `write` called whenever this visit's result is written back: it submits further
        writes from the sub-group's slot, which is held until they are done too."""
        group.owed.append(write)

    def flush(self) -> None:
        """Wait until every sub-group's newest bytes are on NVMe; raises the first write error."""
        self._worker.call(self._traffic.flush)

    def read_with(self, read_outputs: ReadOutputs) -> None:
        """Have what `read_outputs` lists read, too, whenever a sub-group is brought into memory."""
        self._traffic.read_outputs = read_outputs

    # --- outside a step -----------------------------------------------------------------------

    def initialise(self, visit: Visit) -> None:
        """Let `visit` make the first masters of every sub-group, one after the other, in memory
        that is all zeros; the rest of the state counts as never written."""

        def fill() -> None:
            for group in self._groups:
                self._traffic.bring_in_blank(group)
                if self._visit(group, visit):
                    self._traffic.write_back(group, group.layout.masters_nbytes)
            self._traffic.flush()

        self._worker.call(fill)

    def look_at(self, keys: Collection[str], look: Callable[[SubGroup], None]) -> None:
        """Call `look` for each sub-group that has to do with any of these shards, in memory."""
        self.refuse_torn()

        def go(job: Job[None]) -> None:
            for group in self.groups_of(keys):
                if job.stop_asked:
                    return
                self._traffic.bring_in(group)
                look(group)

        self._worker.start(go, is_behind=False).wait()

    def change(
        self,
        keys: Collection[str],
        visit: Visit,
        what: str,
        is_renewed: Callable[[SubGroup], bool] = lambda group: False,
    ) -> None:
        """As `walk`, outside a step and in order; sub-groups that are renewed come as zeros. If it
        raises, all is torn until the same (by `what`) is done again, or `mend`."""

        def go(job: Job[None]) -> None:
            for group in self.groups_of(keys):
                if job.stop_asked:
                    return
                if is_renewed(group):
                    self._traffic.bring_in_blank(group)
                else:
                    self._traffic.bring_in(group)
                if self._visit(group, visit):
                    self._traffic.write_back(group)
            self._traffic.flush()

        torn = None if self._torn == what else self._torn
        self._torn = what
        self._worker.start(go, is_behind=False).wait()
        self._torn = torn

    def tear(self, why: str) -> None:
        """The states are of no use as they are, until `mend`."""
        self._torn = why

    @property
    def is_torn(self) -> bool:
        """True if the states are of no use."""
        return self._torn is not None

    def refuse_torn(self) -> None:
        """Raise SwapUsageError if the states are of no use."""
        if self._torn is not None:
            raise SwapUsageError(self._torn, fix="load the last checkpoint, parameters "
                                 "included, or repeat the write that failed")

    def mend(self) -> None:
        """All states have been replaced: what was half updated is so no more."""
        self._torn = None

    def close(self) -> None:
        """End the thread. The state is as good as gone."""
        self._worker.close()

    def record(self, timeline: Timeline | None) -> None:
        """Note reads, updates, writes and waits there from now on; None: no more."""

        def go() -> None:
            self._traffic.timeline = timeline

        self._worker.call(go)

    def stats(self, gradient_nbytes: int = 0) -> OptimizerStats:
        """Counters since the start; `gradient_nbytes` is passed through."""
        return OptimizerStats(
            sub_group_count=len(self._groups),
            in_ram_count=sum(group.in_ram for group in self._groups),
            step_count=self._step_count,
            hit_count=self._hit_count,
            read_nbytes=self._traffic.read_nbytes,
            write_nbytes=self._traffic.write_nbytes,
            step_s=self._step_s,
            stall_s=self._stall_s,
            update_s=self._update_s,
            gradient_nbytes=gradient_nbytes,
        )
