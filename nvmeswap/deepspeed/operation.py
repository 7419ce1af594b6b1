"""One read or write of DeepSpeed's engine API: the transfers it takes, and its end.

Direct transfers need aligned offsets, and a direct write of odd length would zero what follows. So
a write of odd length is two transfers, its tail through the page cache, and what begins at an odd
offset goes through the page cache altogether. A tensor that is not plain CPU memory passes through
a copy.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from nvmeswap.deepspeed.files import FolderFacts, Target
from nvmeswap.deepspeed.pinned import PinnedBlock, pinned_memory
from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapForkError,
    SwapReadError,
    SwapTimeoutError,
    SwapUsageError,
)
from nvmeswap.io import Direction, Engine, Request

_SLOWEST_NBYTES_PER_S = 10_000_000  # arbitrary: a tenth of the slowest disk
_PATIENCE_S = 60.0
_COMPARED_NBYTES = 1 << 24


def require_tensor(buffer: torch.Tensor) -> None:
    """Raises SwapUsageError for what is no dense tensor."""
    is_dense = isinstance(buffer, torch.Tensor) and buffer.layout is torch.strided
    if not is_dense or buffer.is_meta or buffer.is_quantized:
        raise SwapUsageError("a buffer must be a dense tensor", fix="pass a torch.Tensor")


def is_plain(buffer: torch.Tensor) -> bool:
    """Are the tensor's bytes its memory, in order, in reach of the CPU?"""
    return (buffer.device.type == "cpu" and buffer.is_contiguous() and not buffer.is_conj()
            and not buffer.is_neg())


class Operation:
    """A read or write under way. `error` is set once it is over, if it failed.

    Args: `engine`, one that works in the folder that `facts` tells of; `buffer`, a dense tensor on
    any device; `validate`, whether to compare with the file afterwards; `counted`, whether it is
    one of those that `wait` counts.
    Construction starts the transfers. Threads: any. Ownership: of the buffer until it is over.
    Raises: SwapPathError, SwapForkError; then nothing is under way.
    """

    def __init__(
        self,
        direction: Direction,
        target: Target,
        offset_bytes: int,
        buffer: torch.Tensor,
        engine: Engine,
        facts: FolderFacts,
        *,
        validate: bool,
        counted: bool,
    ) -> None:
        if direction is Direction.READ and 0 in buffer.stride() and not buffer.is_contiguous():
            raise SwapUsageError("an expanded tensor can't be read into", path=target.path,
                                 fix="pass a tensor with memory for each element")
        self.file = target.identity
        self.begin = offset_bytes
        self.end = offset_bytes + buffer.nbytes
        self.direction = direction
        self.counted = counted
        self.error: SwapError | None = None
        self._path = target.path
        self._validate = validate
        self._destination = buffer
        self._memory = _plain_memory(buffer, direction)
        self._settling = threading.Lock()
        self._over = False
        self._requests: list[Request] = []
        self._block: PinnedBlock | None = None
        if self._memory.nbytes:
            self._block = pinned_memory.begin_transfer(self._memory, engine)
            try:
                self._start(target, facts, engine)
            except BaseException:
                self._wait()
                self._finish()
                raise

    def _start(self, target: Target, facts: FolderFacts, engine: Engine) -> None:
        is_write = self.direction is Direction.WRITE
        transfer = engine.write if is_write else engine.read
        for begin, end, direct in _parts(facts, self.begin, self._memory.nbytes, is_write):
            file = target.open(engine, facts, direct=direct)
            try:
                part = self._memory[begin:end]
                self._requests.append(transfer(file, self.begin + begin, part))
            finally:
                file.close()

    def overlaps(self, begin: int, end: int, direction: Direction) -> bool:
        """Must a transfer of these bytes wait for this one?"""
        if Direction.WRITE not in (direction, self.direction):
            return False
        return self.begin < end and begin < self.end

    def settle(self) -> None:
        """Block until it is over, and deliver what was read; a failure becomes `error`. May be
        repeated. Raises SwapTimeoutError or KeyboardInterrupt, and then it goes on, and
        SwapForkError."""
        with self._settling:
            if self._over:
                return
            self._wait()
            if self.error is None:
                self._deliver()
            self._finish()

    def _wait(self) -> None:
        timeout_s = _PATIENCE_S + self._memory.nbytes / _SLOWEST_NBYTES_PER_S
        for request in self._requests:
            try:
                request.wait(timeout_s)
            except (SwapTimeoutError, SwapForkError):
                raise
            except SwapError as error:
                self.error = self.error or error

    def _deliver(self) -> None:
        if self._validate and self._memory.nbytes:
            self.error = _difference(self._path, self.begin, self._memory)
        if self.direction is Direction.READ and not is_plain(self._destination):
            flat = self._memory.view(self._destination.dtype)
            with torch.no_grad():
                self._destination.copy_(flat.view(self._destination.shape))

    def _finish(self) -> None:
        self._over = True
        self._requests.clear()
        if self._block is not None:
            pinned_memory.end_transfer(self._block)
            self._block = None
        self._memory = self._destination = torch.empty(0, device="cpu")


def _plain_memory(buffer: torch.Tensor, direction: Direction) -> torch.Tensor:
    """The buffer's bytes, flat; of a copy where they are not plain memory."""
    plain = buffer.detach()
    if not is_plain(buffer):
        if direction is Direction.READ:
            plain = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        else:
            plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _parts(
    facts: FolderFacts, offset_bytes: int, nbytes: int, is_write: bool
) -> list[tuple[int, int, bool]]:
    """(begin, end, direct) of the transfers, within the buffer."""
    alignment_nbytes = facts.offset_alignment_nbytes
    if not facts.direct or offset_bytes % alignment_nbytes:
        return [(0, nbytes, False)]
    if not is_write:
        return [(0, nbytes, True)]
    middle = nbytes - nbytes % alignment_nbytes
    parts = [(0, middle, True), (middle, nbytes, False)]
    return [part for part in parts if part[0] < part[1]]


def _difference(path: Path, offset_bytes: int, memory: torch.Tensor) -> SwapReadError | None:
    """Reads the file once more, through the page cache; None when it holds the same bytes."""
    try:
        with path.open("rb") as file:
            file.seek(offset_bytes)
            pieces = memory.split(_COMPARED_NBYTES)
            if all(_equal(file.read(piece.nbytes), piece) for piece in pieces):
                return None
    except OSError as error:
        return SwapReadError(f"{path} can't be validated", path=path, errno=error.errno,
                             fix="see `dmesg` for the drive's state")
    return SwapChecksumError(
        "the file does not hold the bytes that were moved", path=path, offset_bytes=offset_bytes,
        wanted_nbytes=memory.nbytes,
        fix="see `dmesg` for the drive's state; retry, or use another folder",
    )


def _equal(data: bytes, piece: torch.Tensor) -> bool:
    return len(data) == piece.nbytes and torch.equal(
        torch.frombuffer(bytearray(data), dtype=torch.uint8), piece
    )
