"""From a path, or a caller's descriptor, to what a transfer needs: engine, files, space.

Files are opened for each transfer and closed at once (the engine keeps them until it is over), so
that a path that was replaced is never served from an old file, and a file that was removed gives
its space back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvmeswap.errors import SwapPathError, SwapSpaceError, SwapWriteError
from nvmeswap.io import DirectMode, Engine, File, probe_folder
from nvmeswap.io.alignment import padded_nbytes

_DESCRIPTORS = "/proc/self/fd/"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BLOCK_MULTIPLE_NBYTES = 4096
_LARGEST_BLOCK_NBYTES = 1 << 30
_DEEPEST_QUEUE = 4096  # arbitrary, beyond the tags of any drive


class FolderFacts(NamedTuple):
    """What works in a folder; see `FolderProbe`."""

    backend: str
    direct: bool
    offset_alignment_nbytes: int
    memory_alignment_nbytes: int


# Where no trial file can be written (a full disk, a folder of others): threads work everywhere, and
# what a page satisfies satisfies every filesystem.
_UNTRIED = FolderFacts("posix", True, 4096, 4096)


class EngineSize(NamedTuple):
    """A handle's wishes, within what an engine takes."""

    block_nbytes: int
    queue_depth: int
    thread_count: int

    @staticmethod
    def of(block_size: int, queue_depth: int, intra_op_parallelism: int) -> EngineSize:
        """DeepSpeed's threads have a queue each; here one queue takes them all."""
        block_nbytes = padded_nbytes(block_size, _BLOCK_MULTIPLE_NBYTES)
        return EngineSize(
            min(block_nbytes, _LARGEST_BLOCK_NBYTES),
            min(queue_depth * intra_op_parallelism, _DEEPEST_QUEUE),
            min(intra_op_parallelism, 1024),
        )


class Engines:
    """One engine for all handles of the same size and backend; it ends with the last of them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty. For a forked child, which can't use its parent's engines."""
        self._lock = threading.Lock()
        self._engines: weakref.WeakValueDictionary[tuple[str, EngineSize], Engine] = (
            weakref.WeakValueDictionary()
        )
        self._facts: dict[tuple[str, int], FolderFacts] = {}

    def get(self, backend: str, size: EngineSize) -> Engine:
        """Raises SwapConfigError when the kernel refuses the backend."""
        with self._lock:
            engine = self._engines.get((backend, size))
            if engine is None:
                engine = Engine(backend=backend, block_nbytes=size.block_nbytes,
                                queue_depth=size.queue_depth, thread_count=size.thread_count)
                self._engines[backend, size] = engine
            return engine

    def facts(self, folder: str, device: int) -> FolderFacts:
        """Probed once a folder, for some milliseconds; `device` tells another mount there."""
        known = self._facts.get((folder, device))
        if known is not None:
            return known
        try:
            probe = probe_folder(Path(folder))
        except SwapPathError:
            return _UNTRIED
        facts = FolderFacts(probe.backend, probe.direct, probe.offset_alignment_nbytes,
                            probe.memory_alignment_nbytes)
        self._facts[folder, device] = facts
        return facts


engines = Engines()
os.register_at_fork(after_in_child=engines.forget)


class Target(NamedTuple):
    """A file as found, before anything is changed."""

    path: Path
    device: int
    inode: int
    nbytes: int

    @staticmethod
    def of(path: Path, facts: os.stat_result) -> Target:
        """Raises SwapPathError for what is no regular file."""
        if not stat.S_ISREG(facts.st_mode):
            raise SwapPathError(f"{path} is not a regular file", path=path,
                                fix="name a file on the drive that is to be swapped to")
        return Target(path, facts.st_dev, facts.st_ino, facts.st_size)

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all names of one file."""
        return self.device, self.inode

    @property
    def folder(self) -> str:
        """Of the file itself, also where it is named by a descriptor."""
        named = os.fspath(self.path)
        if named.startswith(_DESCRIPTORS):
            named = os.readlink(named)
        return os.path.dirname(named)

    def facts(self) -> FolderFacts:
        """What works there; the first time in a folder it takes some milliseconds."""
        return engines.facts(self.folder, self.device)

    def open(self, engine: Engine, facts: FolderFacts, *, direct: bool) -> File:
        """Raises SwapPathError."""
        alignment_nbytes = facts.offset_alignment_nbytes
        return engine.open(
            self.path,
            direct=DirectMode.PREFER if direct else DirectMode.OFF,
            offset_alignment_nbytes=alignment_nbytes,
            memory_alignment_nbytes=facts.memory_alignment_nbytes,
        )


def path_of(fd: int) -> Path:
    """By which an open file can be opened once more: its name, or where it has none any more, its
    descriptor's. Raises SwapPathError."""
    numbered = Path(f"{_DESCRIPTORS}{fd}")
    try:
        named = numbered.readlink()
        if named.exists() and named.samefile(numbered):
            return named
    except OSError as error:
        raise _refused(numbered, error) from error
    return numbered


def find(path: Path) -> Target:
    """The file to read. Raises SwapPathError when it can't be found."""
    try:
        facts = path.stat()
    except OSError as error:
        raise _refused(path, error) from error
    return Target.of(path, facts)


@contextlib.contextmanager
def created(path: Path) -> Iterator[tuple[int, Target]]:
    """The file to write, created with mode 0600 if it isn't there: an own descriptor, closed at the
    end, and what was found. Raises SwapPathError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would block
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        yield fd, Target.of(path, os.fstat(fd))
    finally:
        os.close(fd)


def take_space(fd: int, target: Target, begin: int, end: int, *, whole: bool) -> None:
    """Make the file reach `end`, with space for what lies beyond its present end; `whole` makes it
    end there. So a full disk is known before anything is overwritten.

    Raises SwapSpaceError, SwapWriteError; then a file that is written whole is as it was.
    """
    size = os.fstat(fd).st_size
    if end < size and whole:
        os.ftruncate(fd, end)
    if end <= size or begin == end:
        return
    begin = max(begin, size)
    if end - begin > _free_nbytes(fd):
        raise _no_space(fd, target, begin, end, errno.ENOSPC)
    try:
        os.posix_fallocate(fd, begin, end - begin)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.ftruncate(fd, end)
            return
        if whole:  # else another writer may have extended the file meanwhile
            os.ftruncate(fd, size)
        if error.errno in _FULL:
            raise _no_space(fd, target, begin, end, error.errno or 0) from error
        raise SwapWriteError(
            "a file can't get its space", path=target.path, offset_bytes=begin,
            wanted_nbytes=end - begin, errno=error.errno, intact="the source in memory",
            fix="see `ulimit -f` for EFBIG",
        ) from error


def _no_space(fd: int, target: Target, begin: int, end: int, code: int) -> SwapSpaceError:
    return SwapSpaceError(
        f"{end - begin:_} bytes were not written: no space", path=target.path,
        offset_bytes=begin, wanted_nbytes=end - begin, got_nbytes=_free_nbytes(fd), errno=code,
        intact="the source in memory, and what the file held",
        fix="free space on this filesystem, or raise the quota, and retry",
    )


def _free_nbytes(fd: int) -> int:
    usage = os.fstatvfs(fd)
    if not usage.f_blocks:
        return sys.maxsize  # ramfs and some network filesystems report no sizes
    free_blocks = usage.f_bavail if os.geteuid() else usage.f_bfree  # root has a reserve
    return free_blocks * usage.f_frsize


def _refused(path: Path, error: OSError) -> SwapPathError:
    return SwapPathError(f"{path} can't be opened", path=path, errno=error.errno,
                         fix="check the path, and who may read and write there")
