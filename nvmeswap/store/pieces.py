"""What a request of the store moves, and what the keys' entries know of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io.digest import CHUNK_NBYTES
from nvmeswap.io.transfer import Direction
from nvmeswap.store.manifest import ManifestEntry
from nvmeswap.store.written import WantedSum, WrittenRange

if TYPE_CHECKING:
    from nvmeswap.store.request import StoreRequest

# Of one request of a batch: enough to hide what a request costs, few enough that the first sums are
# computed while most of the batch is on its way.
MOST_PIECES = 256


@dataclass(slots=True)
class Pieces:
    """What is moved: parallel lists in the order of the file. Either all of each key (`whole`), or
    a part of one key, which begins at `first_byte` of it. `indices` are the caller's numbers."""

    path: Path
    whole: bool
    first_byte: int
    indices: Sequence[int]
    keys: Sequence[str]
    entries: Sequence[ManifestEntry]
    offsets_bytes: Sequence[int]
    memories: Sequence[torch.Tensor]
    sizes_nbytes: Sequence[int]

    def take(self, order: Sequence[int]) -> Pieces:
        """Those at `order`, in that order."""
        return Pieces(
            self.path,
            self.whole,
            self.first_byte,
            [self.indices[each] for each in order],
            [self.keys[each] for each in order],
            [self.entries[each] for each in order],
            [self.offsets_bytes[each] for each in order],
            [self.memories[each] for each in order],
            [self.sizes_nbytes[each] for each in order],
        )

    def cut(self, begin: int, end: int) -> Pieces:
        """Those from `begin` to `end`."""
        return Pieces(
            self.path,
            self.whole,
            self.first_byte,
            self.indices[begin:end],
            self.keys[begin:end],
            self.entries[begin:end],
            self.offsets_bytes[begin:end],
            self.memories[begin:end],
            self.sizes_nbytes[begin:end],
        )

    def for_requests(self) -> Iterator[Pieces]:
        """Cut into what one request moves: at most 256 pieces and 8 MiB, or one that is larger."""
        ends = list(accumulate(self.sizes_nbytes))
        begin = reached_nbytes = 0
        while begin < len(ends):
            most = min(begin + MOST_PIECES, len(ends))
            end = bisect_right(ends, reached_nbytes + CHUNK_NBYTES, begin, most)
            end = max(end, begin + 1)
            yield self.cut(begin, end)
            begin, reached_nbytes = end, ends[end - 1]

    def overlap(self, first_byte: int, nbytes: int) -> bool:
        """Whether any of these bytes of one of the keys is moved."""
        end_byte = self.first_byte + self.sizes_nbytes[0]
        return self.whole or (self.first_byte < first_byte + nbytes and first_byte < end_byte)

    def attach(self, request: StoreRequest) -> None:
        """The request is under way on each key."""
        alone = (request,)
        for entry in self.entries:
            entry.in_flight = entry.in_flight + alone if entry.in_flight else alone

    def detach(self, request: StoreRequest) -> None:
        """It is over. May be repeated."""
        alone = (request,)
        for entry in self.entries:
            if entry.in_flight == alone:
                entry.in_flight = ()
            elif entry.in_flight:
                entry.in_flight = tuple(each for each in entry.in_flight if each is not request)

    def note_writing(self) -> None:
        """From its start until it has succeeded, a write leaves its bytes undefined."""
        end_byte = self.first_byte + self.sizes_nbytes[0]
        for entry in self.entries:
            entry.generation += 1
            if not self.whole:
                entry.written.remove(self.first_byte, end_byte)
            elif entry.written.whole is None:
                entry.written.remove(0, entry.written.nbytes)
            else:
                entry.written.whole = None  # the same, quickly

    def note_written(self, digests: Sequence[int] | None, failed: Collection[int]) -> None:
        """The write is over; `digests` is None where sums are off."""
        if self.whole and digests and not failed:
            for entry, whole in zip(self.entries, digests, strict=True):
                entry.written.whole = whole  # nothing else was written since `note_writing`
            return
        numbered = enumerate(zip(self.entries, self.sizes_nbytes, strict=True))
        for piece, (entry, nbytes) in numbered:
            if piece not in failed:
                digest = digests[piece] if digests else None
                entry.written.add(self.first_byte, self.first_byte + nbytes, digest)

    def wanted_sums(self) -> list[WantedSum]:
        """What a read of them must find. Raises SwapUsageError where nothing was written."""
        wanted: list[WantedSum | None] = [entry.written.whole for entry in self.entries]
        if not self.whole or None in wanted:
            for piece, entry in enumerate(self.entries):
                if not self.whole or wanted[piece] is None:
                    wanted[piece] = self._sums_within(piece, entry)
        return cast("list[WantedSum]", wanted)

    def _sums_within(self, piece: int, entry: ManifestEntry) -> list[WrittenRange]:
        first_byte = self.first_byte
        end_byte = first_byte + self.sizes_nbytes[piece]
        if not entry.written.covers(first_byte, end_byte):
            raise SwapUsageError(
                f'"{self.keys[piece]}" was never written, or its last write failed',
                path=self.path,
                offset_bytes=self.offsets_bytes[piece],
                wanted_nbytes=self.sizes_nbytes[piece],
                fix="write it before reading it",
            )
        return [
            (first - first_byte, end - first_byte, digest)
            for first, end, digest in entry.written.inside(first_byte, end_byte)
        ]


def check_part(
    direction: Direction,
    key: str,
    entry: ManifestEntry,
    first_byte: int,
    end_byte: int,
    alignment_nbytes: int,
) -> None:
    """Asserts that these bytes of a key can be moved alone."""
    nbytes = entry.extent.nbytes
    assert 0 <= first_byte <= end_byte <= nbytes, f"{key}: outside its extent"
    assert first_byte % alignment_nbytes == 0, f"{key}: begins between blocks"
    # The engine pads a direct write with zeros, which must not reach valid bytes.
    ends_whole = end_byte % alignment_nbytes == 0 or end_byte == nbytes
    assert ends_whole or direction is Direction.READ, f"{key}: ends midway"
