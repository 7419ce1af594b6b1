"""Zeros into fresh space, so that the first write there is as fast as any later one.

Facts (docs/design.md has the figures). On thin storage (clouds, thin LVM) fallocate alone leaves a
first write at half the speed of a rewrite or less, because the storage below gives out its space
then. Zeros written buffered, or from 4 KiB pages, take up to ten times as long as direct ones.
"""

from __future__ import annotations

from nvmeswap.io.engine import Engine, File, Lane
from nvmeswap.memory.arena import HUGE_PAGE_NBYTES, Arena

# A request of so many keeps the queue full and ends within any time limit.
_CHUNK_COUNT = 64


def write_zeros(
    engine: Engine, file: File, begin_byte: int, end_byte: int, *, timeout_s: float
) -> None:
    """Writes zeros to [begin_byte, end_byte) of the file. Blocks; each 128 MiB get `timeout_s`,
    and as much to end after a failure. Raises SwapWriteError, SwapSpaceError, SwapTimeoutError."""
    arena = Arena(HUGE_PAGE_NBYTES, pin_memory=False)
    step_nbytes = _CHUNK_COUNT * HUGE_PAGE_NBYTES
    for first_byte in range(begin_byte, end_byte, step_nbytes):
        offsets = range(first_byte, min(first_byte + step_nbytes, end_byte), HUGE_PAGE_NBYTES)
        zeros = [arena.memory[: min(HUGE_PAGE_NBYTES, end_byte - offset)] for offset in offsets]
        request = engine.write_many(file, offsets, zeros, lane=Lane.WRITEBACK)
        try:
            request.wait(timeout_s)
        except BaseException:
            request.cancel()  # else late zeros could meet what is written there next
            request.failed(timeout_s)
            raise
    arena.close()
