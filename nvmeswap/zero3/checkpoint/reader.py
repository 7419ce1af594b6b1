"""A saved checkpoint, read in whatever pieces are asked for."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nvmeswap.errors import SwapError, SwapManifestError, SwapReadError
from nvmeswap.swap.states import Source
from nvmeswap.zero3.checkpoint.boxes import Box, boxes_of


class SavedTensors:
    """What `save` wrote, by name. In memory are one saved piece and the one asked for.

    Raises SwapReadError for a file that is missing, cut short or can't be read; SwapManifestError
    for a name that is not there. Blocking: for the drive. Threads: one at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:
            raise self._failed(".metadata", error) from error
        self._reader.set_up_storage_reader(metadata, False)
        self._tensors = metadata.state_dict_metadata
        self._states: dict[str, list[str]] = {}
        for name in self._tensors:
            self._states.setdefault(name[: name.rfind(".") + 1], []).append(name)

    @property
    def names(self) -> Set[str]:
        """Of tensors and objects."""
        return self._tensors.keys()

    def names_under(self, prefix: str) -> list[str]:
        """Those that begin so and have no further dot: a parameter's states."""
        return self._states.get(prefix, [])

    def shape(self, name: str) -> torch.Size | None:
        """A tensor's; None for an object."""
        entry = self._entry(name)
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def value(self, name: str) -> Any:
        """An object, or a small tensor, whole."""
        entry = self._entry(name)
        if isinstance(entry, TensorStorageMetadata):
            source = self.source(name, entry.size, (0,) * len(entry.size))
            return source.whole()
        plan = _Plan({})
        item = _bytes_item(name)
        self._read(name, [item], plan)
        return torch.load(plan.content, weights_only=True)

    def source(self, name: str, shape: Sequence[int], offsets: Sequence[int]) -> Source:
        """The part of a tensor that begins at `offsets`."""
        self._entry(name)
        return Source(tuple(shape), partial(self._elements, name, tuple(shape), tuple(offsets)))

    def _elements(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], start: int, stop: int
    ) -> Tensor:
        entry = self._entry(name)
        out = torch.empty(stop - start, dtype=entry.properties.dtype, device="cpu")
        boxes = list(boxes_of(shape, start, stop))
        places = {box.moved(offsets): _part(out, box, start) for box in boxes}
        chunks = [
            ChunkStorageMetadata(offsets=place, sizes=torch.Size(box.sizes))
            for place, box in zip(places, boxes, strict=True)
        ]
        items = create_read_items_for_chunk_list(name, entry, chunks)
        if sum(math.prod(item.lengths) for item in items) != stop - start:
            raise SwapManifestError(
                f"the checkpoint does not have all of {name}", field=name, path=self.path,
                fix="resume from an older one",
            )
        self._read(name, items, _Plan(places))
        return out

    def _read(self, name: str, items: list[ReadItem], plan: _Plan) -> None:
        try:
            self._reader.read_data(LoadPlan(items), plan).wait()
        except Exception as error:
            raise self._failed(name, error) from error

    def _entry(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            raise SwapManifestError(
                f"the checkpoint has no {name}", field="missing", path=self.path,
                fix="resume with the model and optimizer that were saved",
            ) from None

    def _failed(self, name: str, error: Exception) -> SwapError:
        return SwapReadError(
            f"{name} can't be read from a checkpoint", path=self.path,
            errno=getattr(error, "errno", None), cause=f"{type(error).__name__}: {error}",
            fix="resume from an older one (step=...), see the kernel's log",
        )


class _Plan(DefaultLoadPlanner):
    """Where DCP's reader puts what it reads: `places`, by where a box begins in the tensor."""

    def __init__(self, places: dict[torch.Size, Tensor]) -> None:
        super().__init__()
        self._places = places
        self.content = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        place = self._places[read_item.dest_index.offset]
        for dim, (begin, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            place = place.narrow(dim, begin, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in its place already."""


def _bytes_item(name: str) -> ReadItem:
    """To read an object."""
    index = MetadataIndex(name)
    nowhere = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


def _part(out: Tensor, box: Box, start: int) -> Tensor:
    return out[box.start - start : box.start - start + box.numel].view(box.sizes)
