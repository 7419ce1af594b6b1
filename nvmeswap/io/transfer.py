"""What a transfer is made of: direction, lane, file, place and memory."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvmeswap.io import native
from nvmeswap.io.filesystem import warn_buffered

if TYPE_CHECKING:
    from nvmeswap._native import FileHandle


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


@dataclass(frozen=True, slots=True)
class Transfer:
    """One element of `Engine.submit_many`: `buffer.nbytes` bytes between `buffer` (a contiguous CPU
    tensor of any dtype) and `file` at `offset_bytes`."""

    file: File
    direction: Direction
    offset_bytes: int
    buffer: torch.Tensor
