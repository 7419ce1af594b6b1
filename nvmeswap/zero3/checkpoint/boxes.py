"""Runs of a shard's elements as boxes, which is what DCP calls a chunk.

The swap cuts a shard wherever a sub-group ends; DCP knows tensors by axis-aligned boxes. A run of
a matrix is at most three: the end of a row, whole rows, the beginning of a row.

Worked example: elements 3 to 13 of a 4 x 4 matrix are row 0 [3, 4), rows 1 to 2, row 3 [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """`sizes` elements from `offsets` on, which are the flat ones from `start` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, offsets: Sequence[int]) -> torch.Size:
        """Where it begins in a tensor whose part at `offsets` this box is counted in."""
        return torch.Size(here + there for here, there in zip(self.offsets, offsets, strict=True))


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a contiguous tensor, counted flat, as boxes in that order."""
    yield from _boxes(tuple(shape), start, stop, (), 0)


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, row: tuple[int, ...], base: int
) -> Iterator[Box]:
    """Of the part of a tensor that `row` selects, which begins at element `base`."""
    ones = (1,) * len(row)
    if start >= stop:
        return
    if not shape:
        yield Box(row, ones, base)
        return
    pitch = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, pitch)
        if within or stop - start < pitch:
            end = min(stop, (index + 1) * pitch)
            inner_base = base + index * pitch
            yield from _boxes(
                shape[1:], within, end - index * pitch, (*row, index), inner_base
            )
        else:
            end = stop - stop % pitch
            count = (end - start) // pitch
            zeros = (0,) * (len(shape) - 1)
            yield Box((*row, index, *zeros), (*ones, count, *shape[1:]), base + start)
        start = end
