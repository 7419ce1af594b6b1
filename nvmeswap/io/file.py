"""Open files: one of the filesystem's, or several striped together."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvmeswap.errors import SwapPathError, SwapUsageError
from nvmeswap.io import native
from nvmeswap.io.filesystem import warn_buffered

if TYPE_CHECKING:
    from nvmeswap._native import FileHandle

# A large read is cut at it, and one block of 1 MiB in flight on each of four drives is enough.
STRIPE_NBYTES = 1 << 20
_STRIPE_LIMIT_NBYTES = 1 << 30
_MEMORY_ALIGNMENT_LIMIT_NBYTES = 4096
# What open() says to O_DIRECT on a filesystem without it.
_DIRECT_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectMode(enum.Enum):
    """Whether files bypass the page cache. Values as in native/interface.h."""

    OFF = 0
    """Never: buffered from the start."""
    PREFER = 1
    """Where the filesystem does it; else buffered, with one `BufferedFallbackWarning` a folder."""
    REQUIRE = 2
    """Always: a refusal is an error."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the files that are striped together: `weight` stripes of each row are in it. A link
    instead of the file is refused, unless it `follows_links`."""

    path: Path
    weight: int = 1
    direct: DirectMode = DirectMode.PREFER
    follows_links: bool = False


@dataclass(frozen=True, slots=True)
class Stripes:
    """How one range of offsets lies over several files; native/stripe.h has the rule and an
    example. `weights`: stripes that each member has in a row; `nbytes`: size of a stripe.

    Raises SwapUsageError for more members or stripes a row than the engine takes.
    """

    weights: tuple[int, ...]
    nbytes: int = STRIPE_NBYTES

    def __post_init__(self) -> None:
        row_count = sum(self.weights)
        if not 1 <= len(self.weights) <= native.MEMBER_LIMIT or min(self.weights) < 1:
            raise SwapUsageError(f"{len(self.weights)} files with weights {self.weights}",
                                 fix=f"use 1 to {native.MEMBER_LIMIT}, each with a weight above 0")
        if row_count > native.STRIPE_LIMIT:
            raise SwapUsageError(f"the weights {self.weights} are {row_count} in all",
                                 fix=f"use smaller ones, {native.STRIPE_LIMIT} in all at most")
        if not 0 < self.nbytes <= _STRIPE_LIMIT_NBYTES or self.nbytes % 4096:
            raise SwapUsageError(f"stripes of {self.nbytes} bytes",
                                 fix="use a multiple of 4096 up to 1 GiB, such as 1 << 20")

    def share(self, member: int, nbytes: int) -> int:
        """How many of the first `nbytes` bytes the member holds: the size that it must have."""
        return native.stripe_share(self.weights, self.nbytes, member, nbytes)

    def find(self, offset_bytes: int) -> tuple[int, int]:
        """The member that holds the byte at an offset, and the byte's offset in it."""
        return native.stripe_find(self.weights, self.nbytes, offset_bytes)


class File:
    """An open swap file, made by `Engine.open` or `Engine.open_striped`.

    `path`: the file, or the first of several; `paths`: all of them; `stripes`: how they share its
    offsets. `offset_alignment_nbytes`: what offsets must be a multiple of while the file is direct
    or when it is striped, and up to where a direct write of odd length zeroes its extent.
    `memory_alignment_nbytes`: memory that is aligned so is used in place, other memory through a
    bounce buffer.

    Threads: any. Blocking: never. Ownership: the descriptors stay open until `close()` and the end
    of the last request on it.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        stripes: Stripes,
        handle: FileHandle,
        *,
        offset_alignment_nbytes: int,
        memory_alignment_nbytes: int,
    ) -> None:
        self.path = paths[0]
        self.paths = paths
        self.stripes = stripes
        self.offset_alignment_nbytes = offset_alignment_nbytes
        self.memory_alignment_nbytes = memory_alignment_nbytes
        self._handle: FileHandle | None = handle

    @property
    def handle(self) -> FileHandle:
        """For native.py. Raises SwapClosedError after `close()`."""
        if self._handle is None:
            raise native.closed_error(f"the file {self.path}")
        return self._handle

    @property
    def direct(self) -> bool:
        """Do all members bypass the page cache now? Warns when one has stopped doing so."""
        if self._handle is None:
            return False
        all_direct = True
        for member, path in enumerate(self.paths):
            is_direct, fallback_errno = native.file_mode(self._handle, member)
            if fallback_errno:
                warn_buffered(path.parent, fallback_errno)
            all_direct = all_direct and is_direct
        return all_direct

    @property
    def wants_aligned_offsets(self) -> bool:
        """Is an offset that is not aligned refused?"""
        return len(self.paths) > 1 or self.direct

    def close(self) -> None:
        """Let go of the descriptors; requests in flight still end. May be repeated."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native.release_file(handle)


def open_file(
    members: Sequence[Member],
    stripe_nbytes: int,
    *,
    offset_alignment_nbytes: int,
    memory_alignment_nbytes: int,
    block_nbytes: int,
) -> File:
    """For engine.py, whose blocks have `block_nbytes`: opens the members, all or none."""
    stripes = Stripes(tuple(member.weight for member in members), stripe_nbytes)
    paths = tuple(member.path for member in members)
    for nbytes, limit_nbytes in (
        (offset_alignment_nbytes, block_nbytes),
        (memory_alignment_nbytes, _MEMORY_ALIGNMENT_LIMIT_NBYTES),
        (offset_alignment_nbytes, stripe_nbytes if len(members) > 1 else block_nbytes),
    ):
        if nbytes < 1 or nbytes & (nbytes - 1) or limit_nbytes % nbytes:
            raise SwapUsageError(f"{nbytes} is no alignment for {paths[0]}",
                                 fix=f"use a power of two that divides {limit_nbytes}")
    opened: list[tuple[int, DirectMode]] = []
    try:
        for member in members:
            opened.append(_open_descriptor(member.path, member.direct, member.follows_links))
        _refuse_twins([fd for fd, _ in opened], paths)
        handle = native.new_file(
            [(fd, mode.value) for fd, mode in opened], stripes.weights, stripe_nbytes,
            offset_alignment_nbytes=offset_alignment_nbytes,
            memory_alignment_nbytes=memory_alignment_nbytes,
        )
    except BaseException:
        for fd, _ in opened:
            os.close(fd)
        raise
    return File(paths, stripes, handle, offset_alignment_nbytes=offset_alignment_nbytes,
                memory_alignment_nbytes=memory_alignment_nbytes)


def _open_descriptor(
    path: Path, direct: DirectMode, follows_links: bool
) -> tuple[int, DirectMode]:
    flags = os.O_RDWR | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    try:
        if direct is DirectMode.OFF:
            return os.open(path, flags), direct
        return os.open(path, flags | os.O_DIRECT), direct
    except OSError as error:
        code = error.errno or 0
        direct_refused = direct is not DirectMode.OFF and code in _DIRECT_REFUSALS
        if not direct_refused or direct is DirectMode.REQUIRE:
            fix = 'use another folder, or direct mode "prefer"' if direct_refused else None
            raise SwapPathError(f"{path} could not be opened", path=path, errno=code,
                                fix=fix) from error
    opened = _open_descriptor(path, DirectMode.OFF, follows_links)
    warn_buffered(path.parent, code)
    return opened


def _refuse_twins(fds: Sequence[int], paths: Sequence[Path]) -> None:
    """One file as two members would be written over by itself."""
    known: dict[tuple[int, int], Path] = {}
    for fd, path in zip(fds, paths, strict=True):
        facts = os.fstat(fd)
        identity = facts.st_dev, facts.st_ino
        if identity in known:
            raise SwapUsageError(f"{path} is the same file as {known[identity]}", path=path,
                                 fix="stripe over different files")
        known[identity] = path
