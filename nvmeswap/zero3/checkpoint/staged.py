"""A copy of a checkpoint's contents in host memory, for a save that goes on beside training."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from nvmeswap.zero3.checkpoint.contents import Resolve, Streamed, Take


class Staged:
    """`contents` as they are now. Each bucket's memory is given back when it has been visited."""

    def __init__(self, contents: Streamed) -> None:
        self.small = copy.deepcopy(contents.small)
        self.paths, self.tied = contents.paths, contents.tied
        self._items = list(contents.items())
        self._bucket_of = contents.bucket_of()
        self._values: dict[int, dict[MetadataIndex, Tensor]] = {}
        indices: dict[int, list[MetadataIndex]] = {}
        for index, number in self._bucket_of.items():
            indices.setdefault(number, []).append(index)

        def take(number: int, resolve: Resolve) -> None:
            self._values[number] = {
                index: resolve(index).clone(memory_format=torch.contiguous_format)
                for index in indices.get(number, ())
            }

        contents.visit(take)

    def items(self) -> Iterator[WriteItem]:
        """What is to be written, apart from what is small."""
        return iter(self._items)

    def bucket_of(self) -> dict[MetadataIndex, int]:
        """The number of the bucket that each item comes in."""
        return self._bucket_of

    def visit(self, take: Take) -> None:
        """As `Contents.visit`; once."""
        for number in list(self._values):
            take(number, self._values.pop(number).__getitem__)
