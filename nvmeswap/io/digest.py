"""Checksums of tensors' bytes: xxh3_64, without the GIL (native/digest.c has the speed).

The sum of memory longer than a chunk is a fold over its chunks, each started from the sum so far:
so it can be computed while later chunks are still being read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nvmeswap.io import native

CHUNK_NBYTES = 8 << 20


def digest_chunk(memory: torch.Tensor, seed: int = 0) -> int:
    """One step of the fold: `memory` (contiguous, CPU) is at most a chunk."""
    assert memory.is_cpu and memory.is_contiguous() and memory.nbytes <= CHUNK_NBYTES
    return native.digest(memory.data_ptr(), memory.nbytes, seed)


def digest(memory: torch.Tensor) -> int:
    """The sum of a contiguous CPU tensor's bytes. Blocks for as long as it takes."""
    if memory.nbytes <= CHUNK_NBYTES:
        return digest_chunk(memory)
    seed = 0
    for chunk in memory.detach().view(-1).view(torch.uint8).split(CHUNK_NBYTES):
        seed = digest_chunk(chunk, seed)
    return seed


def digests(buffers: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each, at the cost of one call."""
    pieces = np.zeros((len(buffers), 3), np.uint64)
    pieces[:, 0] = [buffer.data_ptr() for buffer in buffers]
    sizes = [buffer.nbytes for buffer in buffers]
    pieces[:, 2] = [nbytes if nbytes <= CHUNK_NBYTES else 0 for nbytes in sizes]
    sums = native.digest_pieces(pieces)
    for index, buffer in enumerate(buffers):
        assert buffer.is_cpu and buffer.is_contiguous()
        if buffer.nbytes > CHUNK_NBYTES:
            sums[index] = digest(buffer)
    return sums
