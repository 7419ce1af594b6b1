"""Every failure that nvmeswap reports, sorted by whose fault it is.

All derive from `SwapError`, which carries the facts as attributes (tests and callers check those,
never the prose) and lays them out in one way:

    <what could not be done>
      path    <file>, offset <bytes>
      wanted  <bytes> bytes, got <bytes>
      cause   <errno name> (<errno text>)
      intact  <what is still good>
      fix     <what to do>
"""

from __future__ import annotations

import errno as errno_names
import os
from pathlib import Path


class SwapError(Exception):
    """Base of all nvmeswap errors; never raised itself.

    Attributes: `path` (file or folder), `offset_bytes`, `wanted_nbytes`, `got_nbytes` (or free,
    or available bytes, as the class says), `errno`, `intact` (what is still good), `fix` (what the
    user can do). Each is None where it does not apply.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | Path | None = None,
        offset_bytes: int | None = None,
        wanted_nbytes: int | None = None,
        got_nbytes: int | None = None,
        errno: int | None = None,
        cause: str | None = None,
        intact: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.path = None if path is None else Path(path)
        self.offset_bytes = offset_bytes
        self.wanted_nbytes = wanted_nbytes
        self.got_nbytes = got_nbytes
        self.errno = errno
        self.cause = cause
        self.intact = intact
        self.fix = fix
        super().__init__(self._layout())

    def _layout(self) -> str:
        lines = [self.what]
        if self.path is not None:
            place = str(self.path)
            if self.offset_bytes is not None:
                place += f", offset {self.offset_bytes:_}"
            lines.append(f"  path    {place}")
        if self.wanted_nbytes is not None:
            amount = f"{self.wanted_nbytes:_} bytes"
            if self.got_nbytes is not None:
                amount += f", {self.got_label} {self.got_nbytes:_}"
            lines.append(f"  wanted  {amount}")
        causes = [] if self.cause is None else [self.cause]
        if self.errno is not None:
            name = errno_names.errorcode.get(self.errno, str(self.errno))
            causes.append(f"{name} ({os.strerror(self.errno)})")
        if causes:
            lines.append(f"  cause   {', '.join(causes)}")
        if self.intact is not None:
            lines.append(f"  intact  {self.intact}")
        if self.fix is not None:
            lines.append(f"  fix     {self.fix}")
        return "\n".join(lines)

    got_label = "got"


# --- the configuration ---------------------------------------------------------------------------


class SwapConfigError(SwapError, ValueError):
    """A setting is missing, wrong, or known but not to be honoured; `key` is its path in the
    JSON."""

    def __init__(
        self,
        what: str,
        *,
        key: str | None = None,
        path: str | Path | None = None,
        errno: int | None = None,
        cause: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.key = key
        super().__init__(what, path=path, errno=errno, cause=cause, fix=fix)


class SwapPathError(SwapConfigError):
    """The folder for swap files is missing, is not a folder, or can't be written."""


class SwapBudgetError(SwapError):
    """Host memory asked for does not fit; raised before anything is allocated.

    `wanted_nbytes` is what was asked for, `got_nbytes` what the machine (or the budget) has, and
    `smallest_nbytes` the least that works for this model and configuration.
    """

    got_label = "available"

    def __init__(
        self,
        what: str,
        *,
        wanted_nbytes: int,
        available_nbytes: int,
        smallest_nbytes: int,
        cause: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.smallest_nbytes = smallest_nbytes
        super().__init__(
            what, wanted_nbytes=wanted_nbytes, got_nbytes=available_nbytes, cause=cause, fix=fix
        )


# --- the user's calls ----------------------------------------------------------------------------


class SwapUsageError(SwapError):
    """A call that can't be served: an unknown key, a read into the wrong dtype, a torch operation
    that would silently do the wrong thing on a swapped parameter."""


class SwapOverflowError(SwapError, ArithmeticError):
    """Gradients overflow fp16 at the smallest loss scale allowed."""


class SwapClosedError(SwapUsageError):
    """The engine, pool or store was closed before this call."""


class SwapForkError(SwapUsageError):
    """The engine belongs to the parent process; a forked child can't use it."""


# --- the world -----------------------------------------------------------------------------------


class SwapIOError(SwapError):
    """A transfer failed. Subclasses say which way it went."""


class SwapReadError(SwapIOError):
    """Bytes could not be read; the destination's content is undefined up to its last byte."""


class SwapWriteError(SwapIOError):
    """Bytes could not be written; the source in memory is intact."""


class SwapChecksumError(SwapReadError):
    """Bytes were read, but they are not those that were written."""


class SwapCancelledError(SwapIOError):
    """A transfer was dropped by `Request.cancel` before it went to the drive."""


class SwapSpaceError(SwapWriteError):
    """The filesystem is full: `wanted_nbytes` were needed, `got_nbytes` are free."""

    got_label = "free"


class SwapTimeoutError(SwapError):
    """Something did not happen within the time limit; nothing was lost, waiting again is legal."""


class SwapPoolTimeoutError(SwapTimeoutError):
    """No slot became free in time; `holders` names who has them."""

    def __init__(
        self, what: str, *, wanted_nbytes: int, holders: tuple[str, ...], fix: str | None = None
    ) -> None:
        self.holders = holders
        super().__init__(
            what,
            wanted_nbytes=wanted_nbytes,
            cause="held by " + (", ".join(holders) or "nobody"),
            fix=fix,
        )


class SwapOwnerError(SwapError):
    """The swap folder belongs to another process that is alive."""


class SwapManifestError(SwapError):
    """What is stored under a key differs from what is asked for; `field` names the difference."""

    def __init__(
        self, what: str, *, field: str, path: str | Path | None = None, fix: str | None = None
    ) -> None:
        self.field = field
        super().__init__(what, path=path, fix=fix)


class SwapPeerError(SwapError):
    """Another rank failed in this step; `ranks` names them, and their own errors say why."""

    def __init__(self, what: str, *, ranks: tuple[int, ...], fix: str | None = None) -> None:
        self.ranks = ranks
        super().__init__(what, cause="ranks " + ", ".join(map(str, ranks)), fix=fix)
