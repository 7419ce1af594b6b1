"""Files of raw elements that somebody else wrote, read by ordinary I/O."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import torch

from nvmeswap.errors import SwapReadError

_CHUNK_NBYTES = 8 << 20  # arbitrary: what of a file is in memory twice


def read_raw(path: str | Path, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Reads the first `target.numel()` elements of a file, which are `dtype`, and converts them.
    Raises SwapReadError if it can't be read, or is shorter. Blocks."""
    chunk = torch.empty(_CHUNK_NBYTES, dtype=torch.uint8, device="cpu")
    numel_at_once = _CHUNK_NBYTES // dtype.itemsize
    wanted_nbytes = target.numel() * dtype.itemsize
    got_nbytes = 0
    try:
        with open(path, "rb", buffering=0) as file:
            for part in target.split(numel_at_once):
                memory = chunk[: part.numel() * dtype.itemsize]
                count = _read_full(file, memory.numpy().data)
                got_nbytes += count
                if count < memory.nbytes:
                    break
                part.copy_(memory.view(dtype))
    except OSError as error:
        raise SwapReadError("a file can't be read", path=path, errno=error.errno) from error
    if got_nbytes < wanted_nbytes:
        raise SwapReadError(
            "a file is too short", path=path, wanted_nbytes=wanted_nbytes, got_nbytes=got_nbytes,
            fix="it was cut, or belongs to a model of another size",
        )


def _read_full(file: FileIO, memory: memoryview) -> int:
    """Until `memory` is full or the file ends."""
    got_nbytes = 0
    while got_nbytes < memory.nbytes and (count := file.readinto(memory[got_nbytes:])):
        got_nbytes += count
    return got_nbytes
