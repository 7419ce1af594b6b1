"""Where in a file something lies. Arithmetic only; no file is touched here.

    Worked example, alignment 4096:  allocate(5000) -> offset 0,    padded 8192
                                     allocate(100)  -> offset 8192, padded 4096
                                     free the first -> hole [0, 8192)
                                     allocate(4096) -> offset 0, hole [4096, 8192) left
"""

from __future__ import annotations

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
    """First fit. Neighbouring holes are joined, so what was freed in any order is whole again.

    Does no locking: its owner does.
    """

    def __init__(self, alignment_nbytes: int) -> None:
        self._alignment_nbytes = alignment_nbytes
        self._holes: list[tuple[int, int]] = []  # (offset, nbytes), by offset, never touching
        self._end_bytes = 0

    @property
    def end_bytes(self) -> int:
        """Everything allocated lies below this offset."""
        return self._end_bytes

    def allocate(self, nbytes: int) -> Extent:
        """An extent that overlaps no other. An empty one takes no space."""
        if nbytes == 0:
            return Extent(0, 0, 0)
        own_nbytes = padded_nbytes(nbytes, self._alignment_nbytes)
        for index, (offset_bytes, hole_nbytes) in enumerate(self._holes):
            if hole_nbytes >= own_nbytes:
                left_nbytes = hole_nbytes - own_nbytes
                self._holes[index : index + 1] = (
                    [(offset_bytes + own_nbytes, left_nbytes)] if left_nbytes else []
                )
                return Extent(offset_bytes, nbytes, own_nbytes)
        extent = Extent(self._end_bytes, nbytes, own_nbytes)
        self._end_bytes = extent.end_bytes
        return extent

    def free(self, extent: Extent) -> None:
        """Gives back what `allocate` returned, exactly once. A hole at the end lowers the end."""
        if not extent.padded_nbytes:
            return
        holes = [*self._holes, (extent.offset_bytes, extent.padded_nbytes)]
        joined: list[tuple[int, int]] = []
        for offset_bytes, nbytes in sorted(holes):
            if joined:
                last_offset_bytes, last_nbytes = joined[-1]
                last_end_bytes = last_offset_bytes + last_nbytes
                assert last_end_bytes <= offset_bytes, f"{extent} freed twice"
                if last_end_bytes == offset_bytes:
                    joined[-1] = (last_offset_bytes, last_nbytes + nbytes)
                    continue
            joined.append((offset_bytes, nbytes))
        assert sum(joined[-1]) <= self._end_bytes, f"{extent} was not allocated here"
        if sum(joined[-1]) == self._end_bytes:
            self._end_bytes = joined.pop()[0]
        self._holes = joined
