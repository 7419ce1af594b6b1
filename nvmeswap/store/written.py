"""Which bytes of an extent have been written, and the checksums known for them.

    Worked example, an extent of 8192 bytes:
        write [0, 8192)     -> whole: sum A
        write [4096, 6000)  -> [0, 4096) no sum, [4096, 6000) sum B, [6000, 8192) no sum
        write [0, 8192)     -> whole: sum C
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nvmeswap.io.digest import CHUNK_NBYTES, digest_chunk

WrittenRange = tuple[int, int, int | None]
"""First byte, end byte and sum of bytes that were written as one; or None for a sum, when they are
what is left of that, or sums are off."""

WantedSum = int | list[WrittenRange]
"""What a piece must have when it was read: a sum of all of it, or sums of ranges within it."""


class WrittenRanges:
    """The written bytes of one extent, as disjoint ranges in order. Does no locking.

    `whole`: the sum of all `nbytes`, when they were written as one. Most keys always are, so this
    is what batches look at, key by key; the list is for the others.
    """

    __slots__ = ("_parts", "nbytes", "whole")

    def __init__(self, nbytes: int, ranges: Iterable[WrittenRange] = ()) -> None:
        self.nbytes = nbytes
        self.whole: int | None = None
        self._parts: list[WrittenRange] = []
        for each in ranges:
            self.add(*each)

    @property
    def ranges(self) -> list[WrittenRange]:
        return self._parts if self.whole is None else [(0, self.nbytes, self.whole)]

    def add(self, first_byte: int, end_byte: int, digest: int | None) -> None:
        """Notes a write. What it covers is forgotten; what it covers in part loses its sum."""
        self.remove(first_byte, end_byte)
        if digest is not None and end_byte - first_byte == self.nbytes:
            self.whole = digest
        elif first_byte < end_byte:
            self._parts.append((first_byte, end_byte, digest))
            self._parts.sort(key=lambda each: each[0])

    def remove(self, first_byte: int, end_byte: int) -> None:
        """Notes that these bytes are undefined, as during a write and after a failed one."""
        kept: list[WrittenRange] = []
        if end_byte - first_byte == self.nbytes:
            self._parts = kept
            self.whole = None
            return
        for first, end, digest in self.ranges:
            if end <= first_byte or end_byte <= first:
                kept.append((first, end, digest))
                continue
            if first < first_byte:
                kept.append((first, first_byte, None))
            if end_byte < end:
                kept.append((end_byte, end, None))
        self._parts = kept
        self.whole = None

    def remove_all(self) -> None:
        """Notes that nothing is written."""
        self.remove(0, self.nbytes)

    def covers(self, first_byte: int, end_byte: int) -> bool:
        """Whether every one of these bytes has been written."""
        reached_byte = first_byte
        for first, end, _ in self.ranges:
            if first <= reached_byte < end:
                reached_byte = end
        return reached_byte >= end_byte

    def inside(self, first_byte: int, end_byte: int) -> list[WrittenRange]:
        """The ranges that lie wholly in [first_byte, end_byte)."""
        return [each for each in self.ranges if first_byte <= each[0] and each[1] <= end_byte]


class SumCheck:
    """Compares the sums of ranges of one memory, from its beginning on, while its bytes arrive.

    `verified_nbytes`: how many were compared. `wrong`: the first range that differs, and the sum
    that it has; nothing is compared after it.
    """

    def __init__(self, memory: torch.Tensor, ranges: Iterable[WrittenRange]) -> None:
        self.verified_nbytes = 0
        self.wrong: tuple[WrittenRange, int] | None = None
        self._memory = bytes_of(memory)
        self._left = [each for each in ranges if each[2] is not None]
        self._summed_nbytes = 0  # of the first range that is left
        self._digest = 0

    def advance(self, arrived_nbytes: int) -> None:
        """The first bytes of the memory are there now: looks at each that has not been yet."""
        while self._left and self.wrong is None:
            first_byte, end_byte, wanted = self._left[0]
            begin = first_byte + self._summed_nbytes
            end = min(begin + CHUNK_NBYTES, end_byte)
            if end > arrived_nbytes:
                return
            self._digest = digest_chunk(self._memory[begin:end], self._digest)
            self._summed_nbytes += end - begin
            if end < end_byte:
                continue
            if self._digest == wanted:
                self.verified_nbytes += end_byte - first_byte
                del self._left[0]
            else:
                self.wrong = (self._left[0], self._digest)
            self._summed_nbytes = self._digest = 0


def bytes_of(memory: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat view."""
    assert memory.is_contiguous()
    return memory.detach().view(-1).view(torch.uint8)
