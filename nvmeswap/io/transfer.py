"""What a transfer is made of: direction, lane, place and memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io import native
from nvmeswap.io.file import File

_is_cpu, _layout, _nbytes = map(attrgetter, ("is_cpu", "layout", "nbytes"))
_LEAST_ADDRESS = 1 << 16  # below it Linux maps nothing; a freed storage is at 0
DEVICE_ALIGNMENT_NBYTES = 4096  # cuFile moves other places in pieces (native/gds_move.c)
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


class DeviceRanges:
    """The device memory that an engine knows, by address. True if there is any. May be asked
    while another thread changes it; changes are made one at a time."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._bounds = np.empty((2, 0), np.uint64)  # where each begins and ends; never changed

    def __bool__(self) -> bool:
        return self._bounds.size > 0

    def add(self, address: int, nbytes: int) -> None:
        self._sizes[address] = nbytes
        self._note()

    def remove(self, address: int) -> None:
        self._sizes.pop(address, None)
        self._note()

    def refusal(
        self, file: File, buffers: Sequence[torch.Tensor], pieces: native.Pieces
    ) -> SwapUsageError | None:
        """What is wrong with pieces in device memory, if anything is: bytes there can't be copied
        by the engine, so all must be as direct I/O wants it."""
        begins, ends = self._bounds
        addresses, offsets, sizes = pieces.T
        index = np.searchsorted(begins, addresses, side="right") - 1
        is_inside = (index >= 0) & (addresses < ends[index])
        is_whole = is_inside & (addresses + sizes <= ends[index])
        is_strange = ~np.array(list(map(_is_cpu, buffers))) & (sizes > 0)
        if ((is_strange | is_inside) & ~is_whole).any():
            return SwapUsageError(
                "a buffer on a GPU does not lie in registered memory", path=file.path,
                fix="engine.register_memory() the memory that buffers are parts of",
            )
        alignment = np.uint64(max(DEVICE_ALIGNMENT_NBYTES, file.offset_alignment_nbytes))
        is_odd = (addresses % DEVICE_ALIGNMENT_NBYTES > 0) | ((offsets | sizes) % alignment > 0)
        if (is_inside & is_odd).any():
            return SwapUsageError(
                "a buffer on a GPU is not aligned", path=file.path,
                fix=f"move multiples of {alignment} bytes, between addresses and offsets that are "
                "multiples too",
            )
        return None

    def _note(self) -> None:
        pairs = [(begin, begin + nbytes) for begin, nbytes in sorted(self._sizes.items())]
        self._bounds = np.array(pairs, np.uint64).reshape(-1, 2).T


def pieces_of(
    file: File,
    offsets_bytes: Sequence[int],
    buffers: Sequence[torch.Tensor],
    device_ranges: DeviceRanges,
) -> native.Pieces:
    """The native table of what is to be moved. Raises SwapUsageError for a buffer or an offset
    that can't be served. Its cost a piece is part of every small transfer's."""
    # Asked of all at once: a loop in Python would be half of a small transfer's cost.
    kinds = set(map(type, buffers))
    are_tensors = all(issubclass(kind, torch.Tensor) for kind in kinds)
    if not are_tensors or not (device_ranges or all(map(_is_cpu, buffers))):
        raise SwapUsageError("a buffer must be a CPU tensor", path=file.path, fix="copy it first")
    are_strided = set(map(_layout, buffers)) <= {torch.strided}
    if not are_strided or not all(map(torch.Tensor.is_contiguous, buffers)):
        raise SwapUsageError("a buffer must be contiguous", path=file.path,
                             fix="pass buffer.contiguous(), or a flat view")
    if len(offsets_bytes) != len(buffers):
        raise SwapUsageError(f"{len(offsets_bytes)} offsets for {len(buffers)} buffers")
    pieces = np.empty((len(buffers), 3), np.uint64)
    pieces[:, 0] = list(map(torch.Tensor.data_ptr, buffers))
    pieces[:, 2] = list(map(_nbytes, buffers))
    if ((pieces[:, 0] < _LEAST_ADDRESS) & (pieces[:, 2] > 0)).any():
        raise SwapUsageError("a buffer has no memory: its storage was freed, or it is fake",
                             path=file.path, fix="give it memory before it is moved")
    try:
        offsets = np.array(offsets_bytes, np.int64)
    except OverflowError:
        raise SwapUsageError("an offset is out of range", path=file.path) from None
    pieces[:, 1] = offsets
    ends = pieces[:, 1] + pieces[:, 2]
    if (offsets < 0).any() or (ends > _MOST_BYTES).any():
        raise SwapUsageError("an offset is out of range", path=file.path)
    if file.wants_aligned_offsets and (offsets % file.offset_alignment_nbytes).any():
        wrong = offsets[offsets % file.offset_alignment_nbytes != 0]
        raise SwapUsageError(
            f"offset {wrong[0]} of a direct or striped file is not aligned", path=file.path,
            fix=f"place extents at multiples of {file.offset_alignment_nbytes}",
        )
    if device_ranges and (refusal := device_ranges.refusal(file, buffers, pieces)):
        raise refusal
    return pieces
