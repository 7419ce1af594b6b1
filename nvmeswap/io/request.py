"""The future of a request: one transfer, or many that were started together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nvmeswap.errors import SwapError, SwapTimeoutError
from nvmeswap.io import native
from nvmeswap.io.file import File
from nvmeswap.io.transfer import Direction

if TYPE_CHECKING:
    from nvmeswap._native import RequestHandle
    from nvmeswap.io.engine import Engine


class Request:
    """Pieces of one file under way, made by `Engine.read`, `read_many`, `write` and `write_many`.

    `nbytes`: how much is moved in all. `on_device`: some of it is memory of a GPU.

    Ownership: buffers, file and engine stay alive until the request is over, even if this object
    and all other references to them are dropped. Until then the buffers of a read must not be used,
    and those of a write must not be changed.
    Threads: any; several may wait for one request.
    """

    def __init__(
        self,
        handle: RequestHandle,
        engine: Engine,
        file: File,
        direction: Direction,
        pieces: native.Pieces,
        buffers: Sequence[torch.Tensor],
        on_device: bool,
    ) -> None:
        self.on_device = on_device
        self.nbytes = int(pieces[:, 2].sum())
        self._handle = handle
        self._file = file
        self._direction = direction
        self._pieces = pieces
        self._held: tuple[Engine, Sequence[torch.Tensor]] | None = (engine, buffers)
        self._failures: list[native.Failure] | None = None
        self._refusal: str | None = None  # of cuFile or CUDA, if it moved memory of a GPU

    @property
    def began_s(self) -> float:
        """When it was submitted, in `time.perf_counter` seconds."""
        return native.request_times_s(self._handle)[0]

    @property
    def ended_s(self) -> float | None:
        """When the last of its bytes had been moved, whoever waited for them later; None while it
        is under way."""
        return native.request_times_s(self._handle)[1]

    def done(self) -> bool:
        """Is it over, well or badly? Never blocks. Raises SwapForkError in a forked child."""
        if self._failures is None and not native.request_done(self._handle):
            return False
        self._let_go()
        return True

    def wait(self, timeout_s: float | None = 60.0) -> None:
        """Block, without the GIL, until every piece is over; None waits for ever.

        May be repeated: after a timeout it goes on waiting, after the end it answers the same.

        Raises: SwapTimeoutError when the time is over (the request goes on); SwapReadError,
        SwapWriteError, SwapSpaceError or SwapCancelledError of the first piece that failed, when
        one did; SwapForkError in a forked child.
        """
        if self._wait(timeout_s):
            raise self._error(self._wait(timeout_s)[0])

    def failed(self, timeout_s: float | None = 60.0) -> dict[int, SwapError]:
        """Wait, and return the error of each piece that failed, by its index."""
        return {failure.piece: self._error(failure) for failure in self._wait(timeout_s)}

    def digests(self) -> list[int]:
        """The xxh3_64 of each buffer as it is now; at most 8 MiB each (see digest.py). The buffers
        must be alive, and all of them in host memory. Blocks for as long as it takes, without the
        GIL."""
        assert not self.on_device, "digest.digests copies such memory first"
        return native.digest_pieces(self._pieces)

    def cancel(self) -> None:
        """Drop what has not gone to the drive; the request is over when the rest has landed.

        Never blocks. Pieces dropped fail with SwapCancelledError. No effect once it is over.
        """
        held = self._held
        if held is not None:
            held[0].cancel(self._handle)

    def _wait(self, timeout_s: float | None) -> list[native.Failure]:
        if self._failures is None:
            self._failures = native.wait_request(self._handle, timeout_s)
            if self._failures is None:
                raise self._timeout_error(timeout_s)
            self._let_go()
        return self._failures

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[0].forget(self)
            _ = self._file.direct  # warns if the file fell back
            if self.on_device:
                self._refusal = held[0].told_refusal()

    def _error(self, failure: native.Failure) -> SwapError:
        _, offset_bytes, nbytes = self._pieces[failure.piece].tolist()
        member, member_offset_bytes = self._file.stripes.find(failure.error_offset_bytes)
        return native.transfer_error(
            failure,
            is_write=self._direction is Direction.WRITE,
            paths=self._file.paths,
            member=member,
            member_offset_bytes=member_offset_bytes,
            offset_bytes=offset_bytes,
            nbytes=nbytes,
            gpu_refusal=self._refusal,
        )

    def _timeout_error(self, timeout_s: float | None) -> SwapTimeoutError:
        verb = "write" if self._direction is Direction.WRITE else "read"
        over = ", ".join(map(str, self._file.paths))
        return SwapTimeoutError(
            f"a {verb} was not over within {timeout_s} s",
            cause=f"it is striped over {over}" if len(self._file.paths) > 1 else None,
            path=self._file.path,
            offset_bytes=int(self._pieces[0, 1]),
            wanted_nbytes=self.nbytes,
            intact="the transfer goes on and keeps its buffer",
            fix="wait again; if it never ends, see `dmesg` for the drive's state",
        )
