"""Sub-groups on their way between extents and slots, and who gives up a slot for whom.

Sub-groups that can't be written stay in memory, DIRTY, and are written again on the next occasion.
One that is `in_ram` has a slot for good: it is never read nor written, only what its update owes to
the parameters is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from nvmeswap.errors import SwapError, SwapIOError, SwapTimeoutError
from nvmeswap.io.engine import Lane
from nvmeswap.memory.pool import Pool
from nvmeswap.memory.slot import Slot
from nvmeswap.store.store import Store, StoreRequest
from nvmeswap.swap.shard import Resident, ShardState, Submit
from nvmeswap.swap.sub_group import MasterForm, SubGroupLayout
from nvmeswap.timeline import Timeline

# What is to be read into a sub-group's slot from elsewhere than its extent.
ReadOutputs = Callable[[SubGroupLayout, torch.Tensor, Lane], list[Submit]]


class SubGroup(Resident):
    """One sub-group. `stored_nbytes`: how much of its extent was ever written, from its beginning:
    nothing, its masters, or all. `owed`: what hands its new values to the parameters, until that is
    done."""

    __slots__ = ("in_ram", "index", "layout", "owed", "stored_nbytes")

    def __init__(self, index: int, layout: SubGroupLayout, *, in_ram: bool) -> None:
        super().__init__(layout.key)
        self.index = index
        self.layout = layout
        self.in_ram = in_ram
        self.stored_nbytes = 0
        self.owed: list[Submit] = []

    @property
    def memory(self) -> torch.Tensor:
        """Its slot's."""
        assert self.slot is not None
        return self.slot.memory

    @property
    def can_be_undone(self) -> bool:
        """True if its values from before an update are still on NVMe after it."""
        in_place = any(
            segment.item.master is MasterForm.IN_PLACE
            or (segment.item.master is MasterForm.SPLIT and segment.item.output_dtype is None)
            for segment in self.layout.segments
        )
        return not in_place and not self.in_ram

    def leave_ram(self) -> None:
        """From now on it is swapped; what is in its slot is written on the next occasion."""
        self.in_ram = False
        if self.state is ShardState.CLEAN:
            self.move(ShardState.DIRTY)


class SubGroupTraffic:
    """Moves sub-groups. `remaining` is the order in which they will be needed, by index, and
    `turned` tells whether it runs backwards; `read_outputs`, what belongs to them and lies with the
    parameters. Threads: one."""

    def __init__(
        self, groups: list[SubGroup], *, store: Store | None, pool: Pool | None, timeout_s: float
    ) -> None:
        self._groups = groups
        self._store = store
        self._pool = pool
        self._timeout_s = timeout_s
        self.remaining: Sequence[int] = ()
        self.turned = False
        self.read_outputs: ReadOutputs = lambda layout, memory, lane: []
        self.read_nbytes = self.write_nbytes = 0
        self.timeline: Timeline | None = None
        self._writing: list[SubGroup] = []
        self._late_error: SwapError | None = None

    # --- in -----------------------------------------------------------------------------------

    def bring_in(self, group: SubGroup) -> None:
        """To CLEAN, whatever it takes; what was never stored is undefined, but for masters, which
        are zeros. One left DIRTY by a failed write is written first."""
        self._raise_late_error()
        if group.state is ShardState.DIRTY:
            self.write_back(group)
        if group.state is ShardState.WRITING:
            self.finish_writing(group)
        if group.state is ShardState.ON_NVME:
            slot = group.slot or self._slot_for(group)
            self._start_reading(group, slot)
        if group.state is ShardState.READING:
            requests = list(group.requests)
            group.finish_reading()
            self._note("read", group.key, requests)
        assert group.state is ShardState.CLEAN, group.state

    def bring_in_blank(self, group: SubGroup) -> None:
        """To CLEAN and all zeros, whatever it was and whether or not that could be read."""
        group.owed.clear()
        self._late_error = None
        with contextlib.suppress(SwapIOError):
            if group.state is ShardState.READING:
                group.finish_reading()
            if group.state is ShardState.WRITING:
                self.finish_writing(group)
        if group.state is ShardState.DIRTY:
            group.move(ShardState.CLEAN)
        group.stored_nbytes = 0
        if group.state is ShardState.ON_NVME:
            self._settle(group)
            group.slot = group.slot or self._slot_for(group)
            group.move(ShardState.CLEAN)
        group.memory[: group.layout.slot_nbytes].zero_()

    def read_ahead(self) -> None:
        """Start reading the sub-groups that come next, while slots can be had without waiting."""
        for index in self.remaining[1:]:
            group = self._groups[index]
            if group.state is not ShardState.ON_NVME:
                continue
            slot = group.slot or self._free_slot(group)
            if slot is None:
                return
            self._start_reading(group, slot)

    def breathe(self) -> None:
        """Called often while the processor computes: where a write has ended, its slot goes to the
        next read at once. An error is raised by whatever is called next. Takes microseconds."""
        if any(all(r.done() for r in group.requests) for group in self._writing):
            try:
                self.read_ahead()
            except SwapError as error:
                self._late_error = self._late_error or error

    def _raise_late_error(self) -> None:
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def _start_reading(self, group: SubGroup, slot: Slot) -> None:
        # Also one that is waited for: a demand would hold back the writes that free the next slot.
        store, nbytes, lane = self._store, group.stored_nbytes, Lane.PREFETCH
        reads = self.read_outputs(group.layout, slot.memory, lane)
        if nbytes == 0:
            slot.memory[: group.layout.masters_nbytes].zero_()
        else:
            assert store is not None
            extent = slot.memory[:nbytes]
            reads.insert(0, lambda: [store.read(group.key, extent, lane=lane)])
        group.start_reading(slot, *reads)
        self.read_nbytes += nbytes
        if not group.requests:
            group.finish_reading()

    # --- slots --------------------------------------------------------------------------------

    def _free_slot(self, group: SubGroup) -> Slot | None:
        """A slot without waiting: free, or that of a clean sub-group this step needs no more."""
        assert self._pool is not None
        nbytes = group.layout.slot_nbytes
        slot = self._pool.try_acquire(nbytes, holder=group.key)
        if slot is None:
            self._collect_writes()
            remaining = set(self.remaining)
            done = [
                other
                for other in self._groups
                if other.state is ShardState.CLEAN
                and not other.in_ram
                and other.index not in remaining
            ]
            if done:
                # The walk turns round: what was visited first in this step is needed last.
                first_visited = max if self.turned else min
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
            if victim.state is ShardState.DIRTY:
                self.write_back(victim)
            if victim.state is ShardState.WRITING:
                self.finish_writing(victim)
            if victim.state is ShardState.READING:
                try:
                    victim.finish_reading()
                except SwapIOError:
                    continue  # its slot is free now; it is read again when it is needed
            victim.drop_slot()
        return slot

    def _victim(self, group: SubGroup) -> SubGroup | None:
        """Who gives up its slot when nothing is free: writers first, then who is needed last."""
        held = [
            other
            for other in self._groups
            if other.slot is not None and other is not group and not other.in_ram
        ]
        writing = [other for other in held if other.state is ShardState.WRITING]
        if writing:
            return writing[0]
        order = {index: place for place, index in enumerate(self.remaining)}
        return max(held, key=lambda other: order.get(other.index, len(order)), default=None)

    # --- out ----------------------------------------------------------------------------------

    def write_back(self, group: SubGroup, nbytes: int | None = None) -> None:
        """DIRTY -> WRITING, of all of its extent or the first `nbytes`; straight to CLEAN where
        nothing is to be written."""
        assert group.state is ShardState.DIRTY
        nbytes = group.layout.state_nbytes if nbytes is None else nbytes
        group.requests.clear()
        try:
            if nbytes and not group.in_ram:
                assert self._store is not None
                memory = group.memory[:nbytes]
                group.requests.append(self._store.write(group.key, memory, lane=Lane.WRITEBACK))
                self.write_nbytes += nbytes
            for write in group.owed:
                group.requests.extend(write())
        except BaseException:  # what was not submitted must not pass for written
            self._settle(group)
            raise
        group.stored_nbytes = 0 if group.in_ram else max(group.stored_nbytes, nbytes)
        group.move(ShardState.WRITING)
        self._writing.append(group)
        if not group.requests:
            self.finish_writing(group)

    def flush(self) -> None:
        """Wait until everything is where it belongs; raises the first write error."""
        self._raise_late_error()
        for group in self._groups:
            if group.state is ShardState.DIRTY:
                self.write_back(group)
        for group in list(self._writing):
            self.finish_writing(group)

    def _collect_writes(self) -> None:
        for group in list(self._writing):
            if all(r.done() for r in group.requests):
                self.finish_writing(group)

    def finish_writing(self, group: SubGroup) -> None:
        """WRITING -> CLEAN; on an error back to DIRTY with the data kept, and raise."""
        try:
            for request in group.requests:
                request.wait(self._timeout_s)
        except SwapTimeoutError:
            raise  # still under way: the slot must be kept, and waiting again is legal
        except SwapError:
            self._settle(group)
            self._writing.remove(group)
            group.move(ShardState.DIRTY)
            raise
        self._writing.remove(group)
        group.move(ShardState.CLEAN)
        group.owed.clear()
        self._note("write", group.key, group.requests)

    def _note(self, track: str, key: str, requests: Sequence[StoreRequest]) -> None:
        """A sub-group's transfers, which are over, from when they were submitted to when the drive
        was done: not to when somebody waited."""
        if self.timeline is not None:
            for request in requests:
                began_s, ended_s = request.began_s, request.ended_s
                if began_s is not None and ended_s is not None:
                    self.timeline.add(track, key, began_s, ended_s)

    def _settle(self, group: SubGroup) -> None:
        """After a failure nothing of the write may be in flight before the slot may change
        again."""
        for request in group.requests:
            try:
                request.wait(self._timeout_s)
            except SwapError:
                continue  # the first error is the one that is raised
