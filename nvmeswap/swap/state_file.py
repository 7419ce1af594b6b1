"""Tensors in one safetensors file, written and read piece by piece.

The header is known before the first element is, so pieces go to their places in any order, and
nothing but the piece is in memory. Files are read by read(2), not through a mapping: a drive that
fails, or a file that gets shorter, is then an error and not a signal that ends the process, and
what was read does not count as this process's memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from nvmeswap.errors import (
    SwapClosedError,
    SwapManifestError,
    SwapPathError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.swap.layout import on_host
from nvmeswap.swap.state_header import (
    LARGEST_HEADER_NBYTES,
    LENGTH_NBYTES,
    Place,
    TensorShape,
    find_tensors,
    lay_out,
)

__all__ = ["StateFileReader", "StateFileWriter", "TensorShape"]

_FULL = {errno.ENOSPC, errno.EDQUOT}


class StateFileWriter:
    """Writes a safetensors file piece by piece; it appears at `path` when it is complete.

        with StateFileWriter("state.safetensors", {"weight": TensorShape(dtype, shape)}) as file:
            file.write("weight", 0, values)              # elements 0 to len(values)

    Until then all is in `<path>.<random>.partial`; an older file at `path` is what it was until it
    is replaced, by a rename (of a link, the link is replaced). Leaving the block completes the
    file; an exception in it removes the partial one, which only a killed process leaves behind.
    Without a block, call `complete` or `discard`. The file's mode is that of a new file by the
    umask, as `torch.save`'s: unlike swap files, it is for others to read.

    Raises: SwapSpaceError (the filesystem is full: known here, before anything is written),
    SwapPathError (no such folder, not allowed, `path` is a folder), SwapWriteError, SwapUsageError
    (a dtype, name or text that the format does not have). Whenever it raises, nothing is left.
    Blocking: for as long as the filesystem takes to give the space. Threads: one at a time.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, TensorShape],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path).absolute()  # a later chdir: no matter
        header, self._places = lay_out(self.path, tensors, metadata or {})
        self._missing_counts = {name: tensor.numel for name, tensor in tensors.items()}
        self._completed = False
        self._nbytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        if os.path.isdir(self.path):  # unlike Path's, no error where looking is forbidden
            raise _refused("a state file can't be written", self.path, OSError(errno.EISDIR, ""))
        self._partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._partial, flags, 0o666)
        except OSError as error:
            if error.errno in _FULL:
                raise self._failed(error, 0, self._nbytes) from error
            raise _refused("a state file can't be written", self.path, error) from error
        try:
            self._take_space()
            self._put(memoryview(header), 0)
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Elements [start, start + values.numel()) of a tensor, both counted flat; from any device.
        Each element is to be written once; after an error the same call may be repeated.

        Raises SwapSpaceError, SwapWriteError; SwapUsageError for a name, dtype or range that was
        not announced; SwapClosedError. Blocks until the page cache has it.
        """
        self._check_open()
        place = self._places.get(name)
        if place is None:
            raise SwapUsageError(f"{name!r} was not announced for this file", path=self.path)
        if values.dtype != place.tensor.dtype:
            raise SwapUsageError(
                f"{name!r} is {place.tensor.dtype} in this file, not {values.dtype}",
                path=self.path,
            )
        stop = start + values.numel()
        _check_range(self.path, name, place.tensor, start, stop)
        dense = on_host(name, values).contiguous()
        self._put(_bytes_of(dense), place.byte_of(start))
        self._missing_counts[name] -= values.numel()

    def complete(self) -> None:
        """Makes the file appear at `path`; once this returns, it survives a loss of power.
        Idempotent. Blocks until the drive has all of it.

        Raises SwapUsageError when not as many elements were written as a tensor has, naming the
        tensor; SwapSpaceError, SwapWriteError, SwapPathError; SwapClosedError after `discard`. Then
        the partial file is gone.
        """
        if self._completed:
            return
        self._check_open()
        try:
            self._check_counts()
            self._publish()
        finally:
            self.discard()
        self._completed = True

    def discard(self) -> None:
        """Removes what was written, unless it is complete. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with contextlib.suppress(OSError):  # a drive that is gone says so where it matters
                self._partial.unlink(missing_ok=True)

    def __enter__(self) -> StateFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._fd >= 0:
            self.complete()
        self.discard()

    def _check_open(self) -> None:
        if self._fd < 0:
            raise SwapClosedError("this state file is closed", path=self.path)

    def _check_counts(self) -> None:
        for name, missing_count in self._missing_counts.items():
            if missing_count:
                numel = self._places[name].tensor.numel
                raise SwapUsageError(
                    f"{numel - missing_count:_} elements were written of {name!r}, which has "
                    f"{numel:_}",
                    path=self.path,
                    intact="an older file of this name",
                    fix="write each element of each tensor once",
                )

    def _take_space(self) -> None:
        try:
            usage = shutil.disk_usage(self.path.parent)
            if usage.total and self._nbytes > usage.free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Where the filesystem can't, glibc writes into every block: slow, but it is taken.
            os.posix_fallocate(self._fd, 0, self._nbytes)
        except OSError as error:
            raise self._failed(error, 0, self._nbytes) from error

    def _put(self, content: memoryview, offset_bytes: int) -> None:
        while content:
            try:
                done_nbytes = os.pwrite(self._fd, content, offset_bytes)
            except OSError as error:
                raise self._failed(error, offset_bytes, len(content)) from error
            content = content[done_nbytes:]
            offset_bytes += done_nbytes

    def _publish(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error, 0, self._nbytes) from error
        try:
            self._partial.replace(self.path)
        except OSError as error:
            raise _refused("a state file can't be put in its place", self.path, error) from error
        try:
            _sync_folder(self.path.parent)
        except OSError as error:
            raise SwapWriteError(
                "a state file is in its place, but may not survive a loss of power",
                path=self.path, errno=error.errno, intact="the file, while the machine runs",
                fix="save it once more",
            ) from error

    def _failed(self, error: OSError, offset_bytes: int, nbytes: int) -> SwapWriteError:
        intact = "an older file of this name"
        if error.errno in _FULL:
            return SwapSpaceError(
                "the filesystem is too full for a state file", path=self.path,
                offset_bytes=offset_bytes, wanted_nbytes=nbytes,
                got_nbytes=shutil.disk_usage(self.path.parent).free, errno=error.errno,
                intact=intact, fix="free space, or choose another folder",
            )
        return SwapWriteError(
            "a state file can't be written", path=self.path, offset_bytes=offset_bytes,
            wanted_nbytes=nbytes, errno=error.errno, intact=intact,
            fix="see `ulimit -f` for EFBIG, the kernel's log for EIO",
        )


class StateFileReader:
    """Reads a safetensors file, whoever wrote it, piece by piece.

    Attributes: `path`; `metadata`, its texts; `tensors`, what it holds, by name.

    Raises: SwapPathError (no such file, not allowed, not a regular file), SwapManifestError (not a
    safetensors file, cut short, or of a dtype that torch does not have; `field` says which part of
    it), SwapReadError (the drive failed). Blocking: while it reads the header. Threads: any may
    read; close when none does. A file that is replaced meanwhile is read as it was.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # Not to wait for who writes a pipe; a regular file does not care.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _refused("a state file can't be opened", self.path, error) from error
        try:
            self._places, metadata = self._read_header()
        except BaseException:
            self.close()
            raise
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorShape] = MappingProxyType(
            {name: place.tensor for name, place in self._places.items()}
        )

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor, both counted flat, as a new flat tensor. Nothing else
        is read.

        Raises SwapManifestError (field: the name) when the file has no such tensor; SwapUsageError
        for a range outside of it; SwapReadError; SwapClosedError. Blocks for the drive.
        """
        if self._fd < 0:
            raise SwapClosedError("this state file is closed", path=self.path)
        place = self._places.get(name)
        if place is None:
            raise SwapManifestError(f"this file has no tensor {name!r}", field=name, path=self.path)
        _check_range(self.path, name, place.tensor, start, stop)
        values = torch.empty(stop - start, dtype=place.tensor.dtype, device="cpu")
        self._fill(_bytes_of(values), place.byte_of(start))
        return values

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> StateFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> tuple[dict[str, Place], dict[str, str]]:
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            raise SwapPathError("a state file is a regular file, this is not", path=self.path)
        length = bytearray(min(LENGTH_NBYTES, facts.st_size))
        self._fill(memoryview(length), 0)
        data_begin = LENGTH_NBYTES + int.from_bytes(length, "little")
        if data_begin <= min(facts.st_size, LENGTH_NBYTES + LARGEST_HEADER_NBYTES):
            # The library maps the file. What can't be read is found here, not by a signal there.
            self._fill(memoryview(bytearray(data_begin)), 0)
        try:
            # By the descriptor, because another file may have got the name.
            return find_tensors(self.path, f"/proc/self/fd/{self._fd}", data_begin)
        except OSError as error:
            raise self._failed(error, 0, data_begin) from error

    def _fill(self, content: memoryview, offset_bytes: int) -> None:
        while content:
            try:
                done_nbytes = os.preadv(self._fd, [content], offset_bytes)
            except OSError as error:
                raise self._failed(error, offset_bytes, len(content)) from error
            if not done_nbytes:
                raise self._failed(None, offset_bytes, len(content))
            content = content[done_nbytes:]
            offset_bytes += done_nbytes

    def _failed(self, error: OSError | None, offset_bytes: int, nbytes: int) -> SwapReadError:
        return SwapReadError(
            "a state file can't be read", path=self.path, offset_bytes=offset_bytes,
            wanted_nbytes=nbytes, errno=None if error is None else error.errno,
            cause="the file has become shorter" if error is None else str(error),
            fix="see the kernel's log, or take an older file",
        )


def _bytes_of(dense: torch.Tensor) -> memoryview:
    return dense.view(-1).view(torch.uint8).numpy().data


def _check_range(path: Path, name: str, tensor: TensorShape, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= tensor.numel:
        raise SwapUsageError(
            f"elements {start:_} to {stop:_} of {name!r}, which has {tensor.numel:_}", path=path
        )


def _refused(what: str, path: Path, error: OSError) -> SwapPathError:
    return SwapPathError(what, path=path, errno=error.errno,
                         fix="name a file in a folder that exists and that you may use")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
