"""The order of use: recorded in one step, replayed in the next. Pure, does no I/O.

A wrong plan costs time, never correctness: callers use it to decide what to read ahead and what to
evict, and read what they need whatever the plan says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

_LONGEST_STEP = 1 << 16  # arbitrary: far above the uses of one step


class Plan:
    """The keys in the order in which the last step used them, and a position in it.

    `use(key)` is called at each use, `end_step()` when the step is over. Before the first
    `end_step()` or `expect()` nothing is known: nothing is upcoming, and every next use is equally
    far.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._order: list[str] = []
        self._places: dict[str, list[int]] = {}
        self._position = 0
        self._recording: list[str] = []

    def use(self, key: str) -> None:
        """Record a use, and move behind its place in the plan; a key that the plan does not have
        from here on leaves the position where it is. A use after the plan's end is of a pass more
        than in the last step, or of passes without steps: the plan begins again."""
        self._recording.append(key)
        if self._position == len(self._order):
            self._position = 0
        if len(self._recording) > _LONGEST_STEP:
            self.end_step()  # pure inference: there is no optimizer step that would say so
        places = self._places.get(key, [])
        index = bisect_left(places, self._position)
        if index < len(places):
            self._position = places[index] + 1

    def end_step(self) -> None:
        """What was recorded becomes the plan; the position is its start."""
        if self._recording:
            self.expect(self._recording)
        self._position = 0

    def expect(self, order: Sequence[str]) -> None:
        """Make this the plan, from its start; recording begins anew."""
        self._order, self._recording = list(order), []
        self._position = 0
        self._places = {}
        for place, key in enumerate(self._order):
            self._places.setdefault(key, []).append(place)

    def rewind(self) -> None:
        """The next use is at the start of the plan again; what is being recorded goes on."""
        self._position = 0

    @property
    def order(self) -> Sequence[str]:
        """The whole plan."""
        return self._order

    def rest(self) -> Iterator[str]:
        """The keys from the position on, in order of use, and no further than the step's end."""
        return islice(self._order, self._position, None)

    def upcoming(self) -> Iterator[str]:
        """The keys from the position on, in order of use, then the next step's; one round."""
        yield from self._order[self._position :]
        yield from self._order[: self._position]

    def next_use(self, key: str) -> int:
        """How many uses away the next one of `key` is; a key not in the plan is furthest."""
        places = self._places.get(key)
        if not places:
            return 2 * len(self._order)
        index = bisect_left(places, self._position)
        if index < len(places):
            return places[index] - self._position
        return places[0] + len(self._order) - self._position
