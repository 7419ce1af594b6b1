"""A .swp file, on one drive or several: its space, taken up front, and its face in the engine.

Facts. fallocate mode 0 takes the space and moves the size, so that no later write extends the file
(extending takes the inode's lock and is done by kernel workers). Past free space ext4 keeps what it
could get, so a failure must be truncated back. glibc's posix_fallocate hides a filesystem that
can't (it writes a byte into every block instead), so the system call itself is asked: EOPNOTSUPP,
EINVAL or (a sandbox without the call) ENOSYS mean ftruncate, and then a full disk shows up in the
first write. ramfs and some network filesystems report no sizes at all: then there is nothing to
check.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from nvmeswap.errors import SwapPathError, SwapSpaceError, SwapWriteError
from nvmeswap.io.engine import DirectMode, Engine, File, Member
from nvmeswap.io.file import Stripes
from nvmeswap.io.probe import FolderProbe
from nvmeswap.store.extents import Extent, ExtentAllocator
from nvmeswap.store.zeros import write_zeros

_libc = ctypes.CDLL(None, use_errno=True)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_MAP_NORESERVE = 0x4000  # linux/mman.h: a mapping may be larger than memory
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
GROWTH_NBYTES = 64 << 20  # arbitrary: few growths for small tensors, little wasted on the last


class SwapFile:
    """One file, or one on each of several drives striped together, and the extents in it. Does no
    locking: its store does.

    Attributes: `path`, the (first) file; `file`, for the engine; `nbytes`, its size over all
    drives, all of it allocated.
    """

    def __init__(self, path: Path, nbytes: int, engine: Engine, probe: FolderProbe,
                 alignment_nbytes: int, *, ephemeral: bool = False) -> None:
        """Creates the file with `nbytes` of space; of several drives `path` is on the first, and
        has the same place on the others. An ephemeral one has no name once it is open: its space
        comes back however the process ends. Blocks for as long as the filesystem takes.

        Raises SwapSpaceError (the filesystem is full, nothing is left behind), SwapPathError (the
        file exists, or can't be created), SwapWriteError (any other refusal of space). Their `path`
        is on the drive that refused.
        """
        self.path = path
        self.nbytes = 0
        self.extents = ExtentAllocator(alignment_nbytes)
        self._stripes = Stripes(tuple(drive.weight for drive in probe.drives))
        self._parts: list[_Part] = []
        self._mapping: mmap.mmap | None = None
        self._engine = engine
        try:
            for drive in probe.drives:
                self._parts.append(_Part(_on_drive(path, drive.folder, probe.folder)))
            self._grow_to(nbytes)
            self.file: File = engine.open_striped(
                [
                    Member(part.path, drive.weight,
                           DirectMode.PREFER if drive.direct else DirectMode.OFF)
                    for part, drive in zip(self._parts, probe.drives, strict=True)
                ],
                stripe_nbytes=self._stripes.nbytes,
                offset_alignment_nbytes=probe.offset_alignment_nbytes,
                memory_alignment_nbytes=probe.memory_alignment_nbytes,
            )
            if ephemeral:
                self._unlink()
        except BaseException:
            self._unlink()
            self._close_parts()
            raise

    def allocate(self, sizes_nbytes: Sequence[int]) -> list[Extent]:
        """An extent for each, growing the file where needed: by a large piece, or where that does
        not fit, by just enough. Raises SwapSpaceError with the file as it was."""
        extents = [self.extents.allocate(nbytes) for nbytes in sizes_nbytes]
        try:
            if self.extents.end_bytes > self.nbytes:
                try:
                    self._grow_to(self.extents.end_bytes + GROWTH_NBYTES)
                except SwapSpaceError:
                    self._grow_to(self.extents.end_bytes)
        except BaseException:
            for extent in reversed(extents):
                self.extents.free(extent)
            raise
        return extents

    def reserve(self, nbytes: int, *, timeout_s: float) -> int:
        """Makes it at least `nbytes` large and fills what that adds with zeros, by direct writes.
        Returns how many bytes were added. Blocks; each request gets `timeout_s`. Raises as `write`
        does, with the file as large as it was."""
        nbytes_before = self.nbytes
        if nbytes <= nbytes_before:
            return 0
        self._grow_to(nbytes)
        try:
            write_zeros(self._engine, self.file, nbytes_before, nbytes, timeout_s=timeout_s)
        except BaseException:
            self._shrink_to(nbytes_before)
            raise
        return nbytes - nbytes_before

    def map(self, *, is_private: bool) -> mmap.mmap:
        """The whole file as memory: reading a page brings it to the page cache, which the kernel
        keeps in step with direct transfers. `is_private`: a page that is written to is the
        process's own then; else it is the file's. For a file on one drive. It outlives `close` and
        `remove`; a failing drive kills who touches it (SIGBUS)."""
        assert len(self._parts) == 1, "a striped file is no single mapping"
        if self._mapping is None or len(self._mapping) < self.nbytes:
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if is_private else mmap.MAP_SHARED
            self._mapping = mmap.mmap(self._parts[0].fileno(), self.nbytes, flags=flags)
        return self._mapping

    def close(self) -> None:
        """Closes it in the engine. The file stays; removing it is the owner's."""
        self.file.close()
        self._close_parts()

    def remove(self) -> None:
        """Closes it and gives its space back now."""
        self.close()
        self._unlink()

    def _grow_to(self, nbytes: int) -> None:
        """All parts or none: each by its share."""
        try:
            for index, part in enumerate(self._parts):
                part.grow_to(self._stripes.share(index, nbytes))
        except BaseException:
            self._shrink_to(self.nbytes)
            raise
        self.nbytes = nbytes

    def _shrink_to(self, nbytes: int) -> None:
        for index, part in enumerate(self._parts):
            part.shrink_to(self._stripes.share(index, nbytes))
        self.nbytes = nbytes

    def _close_parts(self) -> None:
        for part in self._parts:
            part.close()

    def _unlink(self) -> None:
        for part in self._parts:
            part.path.unlink(missing_ok=True)


def _on_drive(path: Path, folder: Path, first_folder: Path) -> Path:
    """The place on another drive that `path` has on the first."""
    return path if folder == first_folder else folder / path.relative_to(first_folder)


class _Part:
    """What one drive has of a swap file: a new file, and its space. Its descriptor is kept, because
    the file may lose its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        try:
            self._fd = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SwapPathError(
                "a swap file can't be created", path=path, errno=error.errno,
                fix="remove the file if it is there: nobody may share a swap file",
            ) from error

    def grow_to(self, nbytes: int) -> None:
        more_nbytes = nbytes - self.nbytes
        if more_nbytes <= 0:
            return
        usage = shutil.disk_usage(self.path.parent)
        if usage.total and more_nbytes > usage.free:
            raise self._space_error(more_nbytes, None)
        try:
            _take_space(self._fd, self.nbytes, more_nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self.nbytes)
            if error.errno in _FULL:
                raise self._space_error(more_nbytes, error.errno) from error
            raise SwapWriteError(
                "a swap file can't get its space", path=self.path, wanted_nbytes=more_nbytes,
                errno=error.errno, intact="the file is as it was",
                fix="see `ulimit -f` for EFBIG",
            ) from error
        self.nbytes = nbytes

    def shrink_to(self, nbytes: int) -> None:
        """Or leave it as large as it is, where even that fails: it has its share all the same."""
        if nbytes >= self.nbytes:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, nbytes)
            self.nbytes = nbytes

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _space_error(self, wanted_nbytes: int, error_number: int | None) -> SwapSpaceError:
        return SwapSpaceError(
            "the filesystem for swap files is full",
            path=self.path,
            wanted_nbytes=wanted_nbytes,
            got_nbytes=shutil.disk_usage(self.path.parent).free,
            errno=error_number,
            intact="what was stored before; the space that was taken is given back",
            fix='free space, or choose another "nvme_path"',
        )


def _take_space(fd: int, offset_bytes: int, nbytes: int) -> None:
    while _libc.fallocate(fd, 0, ctypes.c_int64(offset_bytes), ctypes.c_int64(nbytes)) != 0:
        error_number = ctypes.get_errno()
        if error_number == errno.EINTR:
            continue
        if error_number in _NO_FALLOCATE:
            os.ftruncate(fd, offset_bytes + nbytes)
            return
        raise OSError(error_number, os.strerror(error_number))
