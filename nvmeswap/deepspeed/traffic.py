"""Moves sub-groups and gradients between their files and memory, within a budget.

Who needs memory gets, in this order: what is free; what a write leaves behind once it is over; what
was read ahead; the place of the gradient that came first, which is written for that. Only then the
budget is exceeded. What was not written successfully stays in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from nvmeswap.deepspeed.buffers import HostBuffer, HostBuffers
from nvmeswap.deepspeed.sub_group import Content, Gradient, Place, SubGroup
from nvmeswap.errors import SwapError, SwapSpaceError
from nvmeswap.io import Lane
from nvmeswap.store.store import Store


@dataclass
class _Departure:
    """What gives its memory up once it is written; `group` is None for a gradient."""

    contents: Sequence[Content]
    group: SubGroup | None = None

    def done(self) -> bool:
        return all(each.request is None or each.request.done() for each in self.contents)


class Traffic:
    """Args: `store` and `buffers`, which it shares with its owner; `largest_nbytes`, of a master;
    `group_count`, how many sub-groups the owner has in memory at a time when there is room.

    Raises, in any call: the SwapWriteError of a write that nobody has waited for yet. Its sub-group
    is in memory, bound. Threads: one at a time.
    """

    def __init__(
        self, store: Store, buffers: HostBuffers, *, largest_nbytes: int, group_count: int
    ) -> None:
        self._store = store
        self._buffers = buffers
        self._largest_nbytes = largest_nbytes
        self._group_count = group_count
        self._departures: list[_Departure] = []
        self._ahead: SubGroup | None = None
        self._gradients: dict[str, SubGroup] = {}  # those that have one; the last touched last
        self._files: set[str] = set()
        self._kept: dict[str, int] = {}  # bytes of the sub-groups that stay in memory

    # --- sub-groups ------------------------------------------------------------------------------

    def load(self, group: SubGroup) -> None:
        """Brings all of it into memory, where it is not; then it is KEPT or BOUND. Blocks. Raises
        SwapReadError, SwapChecksumError; then it is AWAY."""
        if group is self._ahead:
            self._ahead = None
        self._end_those_of(group.contents, keeps=True)
        if group.place is not Place.BOUND:
            self._read(group.contents, group, Lane.DEMAND)
            self._finish_reading(group)
            group.place = Place.KEPT

    def load_ahead(self, group: SubGroup) -> None:
        """Starts to read it, and its gradient, if there is room."""
        if group.place not in (Place.AWAY, Place.KEPT) or self._ahead is not None:
            return
        missing: list[Content] = [each for each in group.contents if each.memory is None]
        if (gradient := group.gradient) is not None and gradient.memory is None:
            missing.append(gradient)
        if not missing or sum(each.nbytes for each in missing) > self._buffers.left_nbytes:
            return
        self._read(missing, group, Lane.PREFETCH)
        group.place = Place.COMING
        self._ahead = group

    def write(self, group: SubGroup) -> None:
        """Writes what its files don't have, and waits. It stays where it is. Raises SwapSpaceError,
        SwapWriteError."""
        self._end_those_of(group.contents, keeps=True)
        changed = group.unstored
        self._start_writing(changed)
        _raise_first(_settle(changed))

    def depart(self, group: SubGroup, *, wait: bool) -> None:
        """Starts to write it; its memory is free once that is over. Raises SwapSpaceError with
        nothing changed; waiting, SwapWriteError with the sub-group bound."""
        changed = group.unstored
        self._start_writing(changed)
        group.unbind()
        group.place = Place.LEAVING
        departure = _Departure(group.contents, group)
        self._departures.append(departure)
        if wait:
            self._departures.remove(departure)
            self._end(departure, keeps=False)

    def keep(self, group: SubGroup) -> bool:
        """Takes it out of DeepSpeed's hands without writing it, if there is room for it beyond what
        the others need. Never blocks."""
        others_nbytes = sum(nbytes for each, nbytes in self._kept.items() if each != group.id)
        room_nbytes = self._buffers.budget_nbytes - others_nbytes - group.nbytes
        self._kept.pop(group.id, None)
        working_nbytes = self._largest_nbytes * (len(group.contents) + 1)  # and a gradient
        if room_nbytes < self._group_count * working_nbytes:
            return False
        for content in group.contents:
            if content.buffer is None:
                buffer = self._buffers.take(content.nbytes)
                if buffer is None:
                    return False
                content.move_to(buffer)
        group.unbind()
        group.place = Place.KEPT
        self._kept[group.id] = group.nbytes
        return True

    def release(self, group: SubGroup) -> None:
        """Gives back the memory of all that its files have; waits for what is under way."""
        if group is self._ahead:
            self._ahead = None
            if group.gradient is not None and any(_settle([group.gradient])):
                self._give_back(group.gradient)
        self._end_those_of(group.contents, keeps=True)
        if group.place is Place.BOUND:
            group.unbind()
        _settle(group.contents)  # what was not written is written again
        for content in group.contents:
            if content.is_stored:
                self._give_back(content)
            else:
                self._leave_views_alone(group, content)
        away = all(content.memory is None for content in group.contents)
        group.place = Place.AWAY if away else Place.KEPT
        if away:
            self._kept.pop(group.id, None)

    def _leave_views_alone(self, group: SubGroup, content: Content) -> None:
        """What stays moves to other memory if somebody shows this: on a CPU DeepSpeed gives its
        user views of states, which must not change with them."""
        buffer = content.buffer
        if content.memory is None or buffer is None:
            return
        content.memory = None
        is_viewed = buffer.is_viewed()
        before = content.take_memory(buffer)
        if is_viewed:
            content.buffer = None
            self.fill(group, content)
            assert content.memory is not None
            content.memory.copy_(before)
            del before
            self._buffers.give_back(buffer)

    def discard(self, group: SubGroup) -> None:
        """Forgets what memory has of it, written or not, and its gradient."""
        if group is self._ahead:
            self._ahead = None
        self.drop_gradient(group)
        for content in group.contents:
            self.forget(content)
        group.unbind()
        group.place = Place.AWAY
        self._kept.pop(group.id, None)

    def forget(self, content: Content) -> None:
        """Gives its memory back, whatever is in it; waits for what is under way."""
        self._end_those_of([content], keeps=True)
        _settle([content])
        self._give_back(content)

    def fill(self, group: SubGroup, content: Content) -> None:
        """Gives it memory, content undefined."""
        content.take_memory(self.take(content.nbytes, group))

    # --- gradients -------------------------------------------------------------------------------

    def bring_gradient(self, group: SubGroup) -> Gradient:
        """In memory; made, with nothing in it, where the sub-group has none. Blocks."""
        gradient = group.gradient
        if gradient is None:
            gradient = Gradient(group.id, group.numel, group.master.dtype)
            self.fill(group, gradient)
            group.gradient = gradient
            self._gradients[group.id] = group
            self._spill_beyond_share(group)
            return gradient
        self._gradients[group.id] = self._gradients.pop(group.id)
        self._end_those_of([gradient], keeps=True)
        self._read([gradient], group, Lane.DEMAND)
        failures = _settle([gradient])
        if any(failures):
            self._give_back(gradient)
        _raise_first(failures)
        return gradient

    def drop_gradient(self, group: SubGroup) -> None:
        """It is not needed any more."""
        if group.gradient is not None:
            self.forget(group.gradient)
            group.gradient = None
            del self._gradients[group.id]

    def _spill_beyond_share(self, group: SubGroup) -> None:
        """Begins to write gradients while the backward pass computes, so that the step finds room
        for the sub-groups that it has in memory at a time."""
        states_nbytes = self._largest_nbytes * len(group.contents)
        room_nbytes = self._buffers.budget_nbytes - sum(self._kept.values())
        count = min(self._group_count, (room_nbytes - self._largest_nbytes) // states_nbytes)
        share_nbytes = room_nbytes - max(count, 0) * states_nbytes
        held = [each for each in self._gradients.values() if _is_at_rest(each.gradient)]
        over_nbytes = sum(each.master.nbytes for each in held) - share_nbytes
        for each in held:
            if over_nbytes > 0 and each is not group:
                with contextlib.suppress(SwapSpaceError):  # there may be memory enough all the same
                    over_nbytes -= each.master.nbytes if self._spill(each) else 0

    def _spill(self, group: SubGroup) -> bool:
        gradient = group.gradient
        if not _is_at_rest(gradient) or group.place is Place.BOUND:
            return False
        assert gradient is not None
        if gradient.is_stored:
            self._give_back(gradient)
        else:
            self._start_writing([gradient])
            self._departures.append(_Departure([gradient]))
        return True

    # --- memory ----------------------------------------------------------------------------------

    def take(self, nbytes: int, needy: SubGroup) -> HostBuffer:
        """Memory for `needy`, whose own is left alone. May wait for writes."""
        while (buffer := self._buffers.take(nbytes)) is None:
            if not self._make_room(needy):
                return self._buffers.take_beyond(nbytes)
        return buffer

    def _make_room(self, needy: SubGroup) -> bool:
        if self._departures:
            self._end(self._departures.pop(0), keeps=False)
            return True
        if self._ahead not in (None, needy):
            assert self._ahead is not None
            self.release(self._ahead)
            return True
        for each in self._gradients.values():
            if each is not needy:
                with contextlib.suppress(SwapSpaceError):  # no room there either
                    if self._spill(each):
                        return True
        return False

    def settle(self) -> None:
        """Ends what is written by now. Never blocks."""
        for departure in [each for each in self._departures if each.done()]:
            self._departures.remove(departure)
            self._end(departure, keeps=False)

    def wait_for_writes(self) -> None:
        while self._departures:
            self._end(self._departures.pop(0), keeps=False)

    def _end_those_of(self, contents: Sequence[Content], *, keeps: bool) -> None:
        mine = [
            departure
            for departure in self._departures
            if any(each is content for each in departure.contents for content in contents)
        ]
        for departure in mine:
            self._departures.remove(departure)
            self._end(departure, keeps=keeps)

    def _end(self, departure: _Departure, *, keeps: bool) -> None:
        """Waits for a departure that is no longer listed. With `keeps` memory stays."""
        group = departure.group
        try:
            errors = _settle(departure.contents)
        except BaseException:  # the drive may still read it
            self._departures.insert(0, departure)
            raise
        if any(errors) and group is not None:
            group.bind()
        _raise_first(errors)
        if not keeps:
            for each in departure.contents:
                self._give_back(each)
        if group is not None:
            group.place = Place.KEPT if keeps else Place.AWAY

    def _give_back(self, content: Content) -> None:
        buffer = content.leave_memory()
        if buffer is not None:
            self._buffers.give_back(buffer)

    # --- the store -------------------------------------------------------------------------------

    def _start_writing(self, contents: Sequence[Content]) -> None:
        """All or none. Raises SwapSpaceError."""
        for content in contents:
            self._make_file(content)
        try:
            for content in contents:
                assert content.memory is not None
                content.is_stored = False
                content.request = self._store.write(
                    content.key, content.memory, lane=Lane.WRITEBACK
                )
        except BaseException:
            _settle(contents)
            raise

    def has_file(self, file_name: str) -> bool:
        return file_name in self._files

    def _make_file(self, content: Content) -> None:
        if content.file_name not in self._files:
            self._store.create_file(content.file_name, {content.key: content.spec})
            self._files.add(content.file_name)

    def _read(self, contents: Sequence[Content], group: SubGroup, lane: Lane) -> None:
        """Starts to read those that are not in memory; all or none."""
        started: list[Content] = []
        try:
            for content in contents:
                if content.memory is None:
                    self.fill(group, content)
                    started.append(content)
                    assert content.memory is not None
                    content.request = self._store.read(content.key, content.memory, lane=lane)
        except BaseException:
            _settle(started)
            for content in started:
                self._give_back(content)
            raise

    def _finish_reading(self, group: SubGroup) -> None:
        errors = _settle(group.contents)
        if any(errors):
            self.release(group)
        _raise_first(errors)


def _is_at_rest(gradient: Gradient | None) -> bool:
    return gradient is not None and gradient.memory is not None and gradient.request is None


def _settle(contents: Sequence[Content]) -> list[SwapError | None]:
    """Waits for all, and tells each failure once: where the wait is cut short (SwapTimeoutError,
    Ctrl-C) those that are known by then are told the next time."""
    for content in contents:
        content.finish()
    failures = [content.failure for content in contents]
    for content in contents:
        content.failure = None
    return failures


def _raise_first(errors: Sequence[SwapError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
