"""Checksums of tensors' bytes: xxh3_64, without the GIL (native/digest.c has the speed).

The sum of memory longer than a chunk is a fold over its chunks, each started from the sum so far:
so it can be computed while later chunks are still being read.

A GPU's memory is copied to page-locked memory first, a chunk at a time and on a stream of its own.
That waits for nothing: bytes that a transfer moves, or has moved, must be there.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch

from nvmeswap.io import native

CHUNK_NBYTES = 8 << 20


class _Window:
    """A chunk of page-locked memory through which one GPU's memory is read. One user at a time."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu", pin_memory=True)

    def bring(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of contiguous parts, together at most a chunk; good until the next call. Blocks
        until they are there."""
        with torch.cuda.stream(self._stream):
            copies, end = [], 0
            for part in parts:
                copy = self._memory[end : end + part.nbytes]
                copy.copy_(part.detach().view(-1).view(torch.uint8), non_blocking=True)
                copies.append(copy)
                end += part.nbytes
        self._stream.synchronize()
        return copies


@functools.cache
def _window(device: torch.device) -> _Window:
    return _Window(device)


def digest_chunk(memory: torch.Tensor, seed: int = 0) -> int:
    """One step of the fold: `memory` (contiguous) is at most a chunk. Blocks."""
    assert memory.is_contiguous() and memory.nbytes <= CHUNK_NBYTES
    if memory.is_cpu:
        return native.digest(memory.data_ptr(), memory.nbytes, seed)
    window = _window(memory.device)
    with window.lock:
        (copy,) = window.bring([memory])
        return digest_chunk(copy, seed)


def digest(memory: torch.Tensor) -> int:
    """The sum of a contiguous tensor's bytes. Blocks for as long as it takes."""
    if memory.nbytes <= CHUNK_NBYTES:
        return digest_chunk(memory)
    seed = 0
    for chunk in memory.detach().view(-1).view(torch.uint8).split(CHUNK_NBYTES):
        seed = digest_chunk(chunk, seed)
    return seed


def digests(buffers: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each, at the cost of one call. On a GPU that holds for neighbours in the list that
    are a chunk together; others there are summed one by one. Blocks."""
    if all(buffer.is_cpu for buffer in buffers):
        return _host_digests(buffers)
    sums: list[int] = []
    for device, group in itertools.groupby(buffers, lambda buffer: buffer.device):
        summed = _host_digests if device.type == "cpu" else _device_digests
        sums += summed(list(group))
    return sums


def _device_digests(buffers: Sequence[torch.Tensor]) -> list[int]:
    if sum(buffer.nbytes for buffer in buffers) > CHUNK_NBYTES:
        return list(map(digest, buffers))
    window = _window(buffers[0].device)
    with window.lock:
        return _host_digests(window.bring(buffers))


def _host_digests(buffers: Sequence[torch.Tensor]) -> list[int]:
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
