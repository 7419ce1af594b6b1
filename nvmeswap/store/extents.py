"""Where in a file something lies. Arithmetic only; no file is touched here.

    Worked example, alignment 4096:  allocate(5000) -> offset 0,    padded 8192
                                     allocate(100)  -> offset 8192, padded 4096
                                     free the first -> hole [0, 8192)
                                     allocate(4096) -> offset 0, hole [4096, 8192) left

Holes are found by their size, and by either of their ends when a neighbour is freed, so that both
calls take O(log n). (The list of different sizes is one memmove more, but holes of k sizes are k²/2
blocks long in all: 10 000 sizes would take 200 GB of them.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from nvmeswap.io.alignment import padded_nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in a .swp file: `nbytes` are valid, `padded_nbytes` belong to it."""

    offset_bytes: int
    nbytes: int
    padded_nbytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.padded_nbytes


class ExtentAllocator:
    """Best fit. Neighbouring holes are joined, so what was freed in any order is whole again; where
    no hole fits, each extent begins where the last one ends.

    Does no locking: its owner does.
    """

    def __init__(self, alignment_nbytes: int) -> None:
        self._alignment_nbytes = alignment_nbytes
        self._end_bytes = 0
        self._allocated: dict[int, int] = {}  # offset to nbytes
        self._holes: dict[int, int] = {}  # offset to nbytes; they never touch, nor reach the end
        self._hole_ends: dict[int, int] = {}  # end to offset
        self._sizes: list[int] = []  # of holes, ascending, each once
        self._holes_of_size: dict[int, dict[int, None]] = {}  # nbytes to offsets

    @property
    def end_bytes(self) -> int:
        """Everything allocated lies below this offset."""
        return self._end_bytes

    def allocate(self, nbytes: int) -> Extent:
        """An extent that overlaps no other. An empty one takes no space."""
        if nbytes == 0:
            return Extent(0, 0, 0)
        own_nbytes = padded_nbytes(nbytes, self._alignment_nbytes)
        index = bisect_left(self._sizes, own_nbytes)
        if index == len(self._sizes):
            offset_bytes = self._end_bytes
            self._end_bytes += own_nbytes
        else:
            hole_nbytes = self._sizes[index]
            offset_bytes = next(reversed(self._holes_of_size[hole_nbytes]))
            self._remove_hole(offset_bytes)
            if hole_nbytes > own_nbytes:
                self._add_hole(offset_bytes + own_nbytes, hole_nbytes - own_nbytes)
        self._allocated[offset_bytes] = own_nbytes
        return Extent(offset_bytes, nbytes, own_nbytes)

    def free(self, extent: Extent) -> None:
        """Gives back what `allocate` returned, exactly once. A hole at the end lowers the end."""
        if not extent.padded_nbytes:
            return
        own_nbytes = self._allocated.pop(extent.offset_bytes, None)
        assert own_nbytes == extent.padded_nbytes, f"{extent} is not allocated"
        offset_bytes, end_bytes = extent.offset_bytes, extent.end_bytes
        if offset_bytes in self._hole_ends:
            offset_bytes = self._hole_ends[offset_bytes]
            self._remove_hole(offset_bytes)
        if end_bytes in self._holes:
            end_bytes += self._remove_hole(end_bytes)
        if end_bytes == self._end_bytes:
            self._end_bytes = offset_bytes
        else:
            self._add_hole(offset_bytes, end_bytes - offset_bytes)

    def _add_hole(self, offset_bytes: int, nbytes: int) -> None:
        self._holes[offset_bytes] = nbytes
        self._hole_ends[offset_bytes + nbytes] = offset_bytes
        if nbytes not in self._holes_of_size:
            self._holes_of_size[nbytes] = {}
            insort(self._sizes, nbytes)
        self._holes_of_size[nbytes][offset_bytes] = None

    def _remove_hole(self, offset_bytes: int) -> int:
        nbytes = self._holes.pop(offset_bytes)
        del self._hole_ends[offset_bytes + nbytes]
        same_size = self._holes_of_size[nbytes]
        del same_size[offset_bytes]
        if not same_size:
            del self._holes_of_size[nbytes]
            del self._sizes[bisect_left(self._sizes, nbytes)]
        return nbytes
