"""One read or write of a key on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nvmeswap.errors import SwapChecksumError, SwapError, SwapTimeoutError
from nvmeswap.io.engine import Direction
from nvmeswap.io.request import Request
from nvmeswap.store.written import WrittenRange, digest_of


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [first_byte, end_byte) of a key, whose extent begins at `offset_bytes` of `path`."""

    key: str
    path: Path
    offset_bytes: int
    first_byte: int
    end_byte: int

    def overlaps(self, other: Place) -> bool:
        return self.first_byte < other.end_byte and other.first_byte < self.end_byte


class StoreRequest:
    """A read or write of a store, from `Store.read` or `Store.write`; wait before using its memory.

    Threads: any thread may ask or wait, several at once too.
    Ownership: the memory is the caller's; it must stay alive, and for a write unchanged, until the
    request is done.
    """

    def __init__(
        self,
        transfer: Request | None,
        direction: Direction,
        place: Place,
        memory: torch.Tensor,
        expected: tuple[WrittenRange, ...],
        *,
        timeout_s: float,
        on_settled: Callable[[StoreRequest, bool], None],
        on_verified: Callable[[int], None],
    ) -> None:
        self.nbytes = memory.numel()
        self.direction = direction
        self.place = place
        self._transfer = transfer
        self._memory = memory
        self._expected = expected
        self._timeout_s = timeout_s
        self._on_settled = on_settled
        self._on_verified = on_verified

    def done(self) -> bool:
        """Whether the bytes have been moved, or failed to be. Never blocks."""
        return self._transfer is None or self._transfer.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the bytes have been moved and, for a read, have their checksums.

        Blocks up to `timeout_s` (None: the store's). Raises SwapTimeoutError (waiting again is
        legal), SwapReadError, SwapWriteError, SwapSpaceError, and SwapChecksumError naming key,
        path, offset and both digests.
        """
        self._wait_for_transfer(self._timeout_s if timeout_s is None else timeout_s)
        if self._expected:
            self._on_verified(verify(self.place, self._memory, self._expected))
            self._expected = ()

    def settle(self) -> None:
        """Waits until the transfer is over, however it ends, and notes the end in the store. Blocks
        up to the store's timeout; raises SwapTimeoutError only."""
        try:
            self._wait_for_transfer(self._timeout_s)
        except SwapTimeoutError:
            raise
        except SwapError:
            pass  # whoever waits for this request is told; the store has noted it

    def _wait_for_transfer(self, timeout_s: float) -> None:
        try:
            if self._transfer is not None:
                self._transfer.wait(timeout_s)
        except SwapTimeoutError:
            raise
        except SwapError:
            self._on_settled(self, False)
            raise
        self._on_settled(self, True)


def verify(place: Place, memory: torch.Tensor, expected: tuple[WrittenRange, ...]) -> int:
    """Compares the sums of ranges inside `place`, whose bytes are in `memory`; returns the bytes
    compared. Raises SwapChecksumError for the first that differs."""
    nbytes = 0
    for written in expected:
        if written.digest is None:
            continue
        first_byte = written.first_byte - place.first_byte
        got = digest_of(memory[first_byte : written.end_byte - place.first_byte])
        if got != written.digest:
            raise SwapChecksumError(
                f'"{place.key}" was read back wrong',
                path=place.path,
                offset_bytes=place.offset_bytes + written.first_byte,
                wanted_nbytes=written.end_byte - written.first_byte,
                cause=f"xxh3_64 expected {written.digest:016x}, got {got:016x}",
                intact="the bytes on the drive were not changed by this read",
                fix="read again; if it stays, the drive or another program changed the file",
            )
        nbytes += written.end_byte - written.first_byte
    return nbytes
