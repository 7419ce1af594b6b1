"""What a transfer is made of: direction, lane, file, place and memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io import native
from nvmeswap.io.filesystem import warn_buffered

if TYPE_CHECKING:
    from nvmeswap._native import FileHandle


_MOST_BYTES = (1 << 63) - 1  # what an offset in a file can be


class Direction(enum.IntEnum):
    """Which way the bytes go, seen from memory. Values as in native/interface.h."""

    READ = 0
    WRITE = 1


class Lane(enum.IntEnum):
    """How urgent a transfer is. Demand goes first; prefetch and writeback share what it leaves, and
    always get on. Within a lane the order is the engine's. Values as in native/interface.h."""

    DEMAND = 0
    PREFETCH = 1
    WRITEBACK = 2


class DirectMode(enum.Enum):
    """Whether files bypass the page cache. Values as in native/interface.h."""

    OFF = 0
    """Never: buffered from the start."""
    PREFER = 1
    """Where the filesystem does it; else buffered, with one `BufferedFallbackWarning` a folder."""
    REQUIRE = 2
    """Always: a refusal is an error."""


class File:
    """An open swap file, made by `Engine.open`.

    `path`: the file. `offset_alignment_nbytes`: what offsets must be a multiple of while the file
    is direct, and up to where a write of odd length zeroes its extent. `memory_alignment_nbytes`:
    memory that is aligned so is used in place, other memory through a bounce buffer.

    Threads: any. Blocking: never. Ownership: the descriptor stays open until `close()` and the end
    of the last request on it.
    """

    def __init__(
        self,
        path: Path,
        handle: FileHandle,
        *,
        offset_alignment_nbytes: int,
        memory_alignment_nbytes: int,
    ) -> None:
        self.path = path
        self.offset_alignment_nbytes = offset_alignment_nbytes
        self.memory_alignment_nbytes = memory_alignment_nbytes
        self._handle: FileHandle | None = handle

    @property
    def handle(self) -> FileHandle:
        """For native.py. Raises SwapClosedError after `close()`."""
        if self._handle is None:
            raise native.closed_error(f"the file {self.path}")
        return self._handle

    @property
    def direct(self) -> bool:
        """Does the file bypass the page cache now? Warns when it has stopped doing so."""
        if self._handle is None:
            return False
        is_direct, fallback_errno = native.file_mode(self._handle)
        if fallback_errno:
            warn_buffered(self.path.parent, fallback_errno)
        return is_direct

    def close(self) -> None:
        """Let go of the descriptor; requests in flight still end. May be repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native.release_file(handle)


def pieces_of(
    file: File, offsets_bytes: Sequence[int], buffers: Sequence[torch.Tensor]
) -> native.Pieces:
    """The native table of what is to be moved. Raises SwapUsageError for a buffer or an offset
    that can't be served. Its cost a piece is part of every small transfer's."""
    for buffer in buffers:
        if not (isinstance(buffer, torch.Tensor) and buffer.is_cpu):
            raise SwapUsageError("a buffer must be a CPU tensor", path=file.path,
                                 fix="copy it first")
        if not (buffer.layout is torch.strided and buffer.is_contiguous()):
            raise SwapUsageError("a buffer must be contiguous", path=file.path,
                                 fix="pass buffer.contiguous(), or a flat view")
    if len(offsets_bytes) != len(buffers):
        raise SwapUsageError(f"{len(offsets_bytes)} offsets for {len(buffers)} buffers")
    pieces = np.empty((len(buffers), 3), np.uint64)
    pieces[:, 0] = [buffer.data_ptr() for buffer in buffers]
    pieces[:, 2] = [buffer.nbytes for buffer in buffers]
    try:
        offsets = np.array(offsets_bytes, np.int64)
    except OverflowError:
        raise SwapUsageError("an offset is out of range", path=file.path) from None
    pieces[:, 1] = offsets
    ends = pieces[:, 1] + pieces[:, 2]
    if (offsets < 0).any() or (ends > _MOST_BYTES).any():
        raise SwapUsageError("an offset is out of range", path=file.path)
    if file.direct and (offsets % file.offset_alignment_nbytes).any():
        wrong = offsets[offsets % file.offset_alignment_nbytes != 0]
        raise SwapUsageError(
            f"offset {wrong[0]} of a direct file is not aligned", path=file.path,
            fix=f"place extents at multiples of {file.offset_alignment_nbytes}",
        )
    return pieces
