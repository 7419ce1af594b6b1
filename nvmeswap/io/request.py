"""The future of one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvmeswap.errors import SwapTimeoutError
from nvmeswap.io import native
from nvmeswap.io.transfer import Direction, Transfer

if TYPE_CHECKING:
    from nvmeswap._native import RequestHandle
    from nvmeswap.io.engine import Engine


class Request:
    """One transfer under way, made by `Engine.read`, `Engine.write` and `Engine.submit_many`.

    `nbytes`: how much is moved.

    Ownership: buffer, file and engine stay alive until the transfer is over, even if this object
    and all other references to them are dropped. Until then the buffer of a read must not be used,
    and that of a write must not be changed.
    Threads: any; several may wait for one request.
    """

    def __init__(self, handle: RequestHandle, transfer: Transfer, engine: Engine) -> None:
        self.nbytes: int = transfer.buffer.nbytes
        self._handle = handle
        self._file = transfer.file
        self._direction = transfer.direction
        self._offset_bytes = transfer.offset_bytes
        self._held: tuple[Transfer, Engine] | None = (transfer, engine)
        self._result: native.Result | None = None

    def done(self) -> bool:
        """Is it over, well or badly? Never blocks. Raises SwapForkError in a forked child."""
        if self._result is None and not native.request_done(self._handle):
            return False
        self._let_go()
        return True

    def wait(self, timeout_s: float | None = 60.0) -> None:
        """Block, without the GIL, until the transfer is over; None waits for ever.

        May be repeated: after a timeout it goes on waiting, after the end it answers the same.

        Raises: SwapTimeoutError when the time is over (the transfer goes on); SwapReadError,
        SwapWriteError or SwapSpaceError when it failed; SwapForkError in a forked child.
        """
        if self._result is None:
            self._result = native.wait_request(self._handle, timeout_s)
            if self._result is None:
                raise self._timeout_error(timeout_s)
            self._let_go()
        if self._result.status != 0:
            raise native.transfer_error(
                self._result,
                is_write=self._direction is Direction.WRITE,
                path=self._file.path,
                offset_bytes=self._offset_bytes,
                nbytes=self.nbytes,
            )

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[1].forget(self)
            _ = self._file.direct  # warns if the file fell back

    def _timeout_error(self, timeout_s: float | None) -> SwapTimeoutError:
        verb = "write" if self._direction is Direction.WRITE else "read"
        return SwapTimeoutError(
            f"a {verb} was not over within {timeout_s} s",
            path=self._file.path,
            offset_bytes=self._offset_bytes,
            wanted_nbytes=self.nbytes,
            intact="the transfer goes on and keeps its buffer",
            fix="wait again; if it never ends, see `dmesg` for the drive's state",
        )
