"""Reads and writes of keys on their way.

A batch flows in one way, and a single read or write is a batch of one: `Store` puts the pieces in
the order of the file and cuts them into requests of at most 256 pieces and 8 MiB. Each goes to the
engine at once; their checksums are computed request by request, while later ones are on their way.
A piece of more than 8 MiB is a request alone, and several transfers of 8 MiB, for the same reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from nvmeswap.errors import SwapChecksumError, SwapError, SwapIOError
from nvmeswap.io.digest import CHUNK_NBYTES, digests
from nvmeswap.io.engine import Direction
from nvmeswap.io.request import Request
from nvmeswap.store.pieces import Pieces
from nvmeswap.store.written import SumCheck, WantedSum, WrittenRange

_MOST_NAMED = 5  # arbitrary: keys in one error


class Keeper(Protocol):
    """What a request tells the store that made it."""

    timeout_s: float

    def note_settled(self, request: StoreRequest, failed: Collection[int]) -> None:
        """Its transfers are over; these pieces of it failed. May be said again."""

    def note_verified(self, nbytes: int) -> None:
        """So many bytes had their sums."""


class StoreRequest:
    """A read or write under way, from `Store.read` and `Store.write`; wait before using its memory.

    Threads: any thread may ask or wait, several at once too.
    Ownership: the memory is the caller's; it must stay alive, and for a write unchanged, until the
    request is done.
    """

    def __init__(
        self,
        direction: Direction,
        pieces: Pieces,
        wanted: Sequence[WantedSum] | None,
        keeper: Keeper,
    ) -> None:
        self.nbytes = sum(pieces.sizes_nbytes)
        self.direction = direction
        self.pieces = pieces
        # The keeper's: it fills the one and sets the others, `noted` before `settled`.
        self.transfers: list[Request] = []
        self.noted = False
        self.settled = False
        self._keeper = keeper
        self._failures: dict[int, SwapError] = {}  # by piece
        self._in_use_count = len(pieces.keys)
        self._lock = threading.Lock()  # of the following; held while sums are computed
        self._digests: list[int] | None = None
        self._wanted = wanted
        self._verified_count = 0  # of the transfers
        self._large = (
            SumCheck(pieces.memories[0], _ranges(wanted[0], self.nbytes))
            if wanted and self.nbytes > CHUNK_NBYTES
            else None
        )

    @property
    def began_s(self) -> float | None:
        """When the first of its transfers was submitted, in `time.perf_counter` seconds; None if
        it moves nothing."""
        return min((each.began_s for each in self.transfers), default=None)

    @property
    def ended_s(self) -> float | None:
        """When the last byte had been moved, before any checksum and whoever waited later; None
        while it is under way, or if it moves nothing."""
        ends_s = [end_s for each in self.transfers if (end_s := each.ended_s) is not None]
        return max(ends_s) if ends_s and len(ends_s) == len(self.transfers) else None

    def done(self) -> bool:
        """Whether the bytes have been moved, or failed to be. Never blocks."""
        return all(each.done() for each in self.transfers)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the bytes have been moved and, for a read, have their checksums.

        Blocks up to `timeout_s` (None: the store's). Raises SwapTimeoutError (waiting again is
        legal), SwapReadError, SwapWriteError, SwapSpaceError, SwapCancelledError, and
        SwapChecksumError naming key, path, offset and both digests.
        """
        failures = self.failed(timeout_s)
        if failures:
            pairs = zip(self.pieces.indices, self.pieces.keys, strict=True)
            raise_first([(key, failures[index]) for index, key in pairs if index in failures])

    def failed(self, timeout_s: float | None = None) -> dict[int, SwapError]:
        """Waits, and returns what went wrong with each piece, by the caller's index: what `wait`
        would raise. Raises SwapTimeoutError only."""
        self._wait_for_transfers(timeout_s, verifies=self._wanted is not None)
        self._keeper.note_settled(self, self._failures.keys())
        indices = self.pieces.indices
        return {indices[piece]: error for piece, error in self._failures.items()}

    def settle(self) -> None:
        """Waits until the transfers are over, however they end, and notes the end in the store.
        Blocks up to the store's timeout; raises SwapTimeoutError only."""
        self._wait_for_transfers(None, verifies=False)
        self._keeper.note_settled(self, self._failures.keys())

    def drop(self) -> None:
        """For a read: one of its pieces is not needed any more. When none is, what has not gone to
        the drive is cancelled; the request is over when the rest has landed. Never blocks."""
        self._in_use_count -= 1
        if self._in_use_count == 0:
            for transfer in self.transfers:
                transfer.cancel()

    def abandon(self) -> None:
        """For the store: its transfers could not all be started, so none of its pieces counts."""
        error = SwapIOError("a transfer was not started")
        self._failures |= dict.fromkeys(range(len(self.pieces.keys)), error)

    def compute_digests(self) -> Sequence[int]:
        """For the store, of a write: the sums of what is written, computed once."""
        with self._lock:
            if self._digests is None:
                self._digests = self._sums()
            return self._digests

    def _sums(self) -> list[int]:
        """Of the pieces as they are in memory now."""
        if self.nbytes <= CHUNK_NBYTES and self.transfers and not self.transfers[0].on_device:
            return self.transfers[0].digests()
        return digests(self.pieces.memories)

    def _wait_for_transfers(self, timeout_s: float | None, *, verifies: bool) -> None:
        deadline = time.monotonic() + (self._keeper.timeout_s if timeout_s is None else timeout_s)
        for number, transfer in enumerate(self.transfers):
            failures = transfer.failed(max(deadline - time.monotonic(), 0.0))
            for piece, error in failures.items():
                what = f'"{self.pieces.keys[piece]}": {error.what}'
                self._failures.setdefault(piece, _like(error, what, error.cause))
            if verifies:
                self._verify(number)

    def _verify(self, number: int) -> None:
        """Compares the sums of what the transfer of this number has brought."""
        with self._lock:
            if number < self._verified_count:
                return  # another waiter was faster
            if self._large is None:
                self._verify_pieces()
            elif 0 not in self._failures:
                self._large.advance((number + 1) * CHUNK_NBYTES)
                if number + 1 == len(self.transfers):
                    self._note(0, self._large)
            self._verified_count = number + 1

    def _verify_pieces(self) -> None:
        assert self._wanted is not None
        pieces = self.pieces
        got = self._sums()
        if got == self._wanted:
            self._keeper.note_verified(self.nbytes)
            return
        for piece, (wanted, nbytes) in enumerate(
            zip(self._wanted, pieces.sizes_nbytes, strict=True)
        ):
            if piece in self._failures:
                continue
            check = SumCheck(pieces.memories[piece], _ranges(wanted, nbytes))
            check.advance(nbytes)
            self._note(piece, check)

    def _note(self, piece: int, check: SumCheck) -> None:
        self._keeper.note_verified(check.verified_nbytes)
        if check.wrong is not None:
            (first_byte, end_byte, wanted), got = check.wrong
            self._failures[piece] = SwapChecksumError(
                f'"{self.pieces.keys[piece]}" was read back wrong',
                path=self.pieces.path,
                offset_bytes=self.pieces.offsets_bytes[piece] + first_byte,
                wanted_nbytes=end_byte - first_byte,
                cause=f"xxh3_64 expected {wanted:016x}, got {got:016x}",
                intact="the bytes on the drive were not changed by this read",
                fix="read again; if it stays, the drive or another program changed the file",
            )


def must_precede(direction: Direction, pieces: Pieces) -> list[StoreRequest]:
    """The requests in flight to settle before these pieces may move: those of the same bytes, but
    for reads before a read. What is done is settled too: that is what notices a failure nobody
    waited for."""
    busy = [
        (earlier, nbytes)
        for entry, nbytes in zip(pieces.entries, pieces.sizes_nbytes, strict=True)
        if entry.in_flight
        for earlier in entry.in_flight
    ]
    return [
        earlier
        for earlier, nbytes in dict(busy).items()
        if earlier.done()
        or (not (earlier.direction is direction is Direction.READ)
        and earlier.pieces.overlap(pieces.first_byte, nbytes))
    ]


def _ranges(wanted: WantedSum, nbytes: int) -> list[WrittenRange]:
    return [(0, nbytes, wanted)] if isinstance(wanted, int) else wanted


class StoreBatch:
    """Many whole keys under way, from `Store.read_many` and `Store.write_many`. Its rules are those
    of `StoreRequest`; a piece that fails leaves the others good.

    `requests`: what it consists of, in the order of the file.
    """

    def __init__(
        self, keys: Sequence[str], requests: Sequence[StoreRequest], *, timeout_s: float
    ) -> None:
        self.requests = requests
        self._keys = keys
        self._timeout_s = timeout_s

    def done(self) -> bool:
        """Whether all bytes have been moved, or failed to be. Never blocks."""
        return all(each.done() for each in self.requests)

    def wait(self, timeout_s: float | None = None) -> None:
        """As `StoreRequest.wait`. Raises the error of the first key that failed, in the order they
        were given; its cause names others."""
        failures = self.failed(timeout_s)
        if failures:
            raise_first([(self._keys[index], failures[index]) for index in sorted(failures)])

    def failed(self, timeout_s: float | None = None) -> dict[int, SwapError]:
        """Waits, and returns what went wrong with each key, by its index among those given. Raises
        SwapTimeoutError only."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        failures: dict[int, SwapError] = {}
        for each in self.requests:
            failures |= each.failed(max(deadline - time.monotonic(), 0.0))
        return failures

    def settle(self) -> None:
        """As `StoreRequest.settle`, of each."""
        for each in self.requests:
            each.settle()


def raise_first(failures: Sequence[tuple[str, SwapError]]) -> None:
    """Raises the first error; where there are others, its cause names their keys."""
    (_, error), *others = failures
    if not others:
        raise error
    names = ", ".join(f'"{key}"' for key, _ in others[:_MOST_NAMED])
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    cause = f"{error.cause}; " if error.cause else ""
    raise _like(error, error.what, f"{cause}also failed: {names}{more}") from error


def _like(error: SwapError, what: str, cause: str | None) -> SwapError:
    """The same error with another text."""
    return type(error)(
        what,
        path=error.path,
        offset_bytes=error.offset_bytes,
        wanted_nbytes=error.wanted_nbytes,
        got_nbytes=error.got_nbytes,
        errno=error.errno,
        cause=cause,
        intact=error.intact,
        fix=error.fix,
    )
