"""What of a folder's files lies in the page cache, and how to let go of it without privileges."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                       ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value


def drop_cached(folder: Path) -> None:
    """Pages that some process has mapped stay; `cached_nbytes` tells."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # what is still to be written would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_nbytes(folder: Path) -> int:
    """Of all files together, in whole pages. Reads nothing of them."""
    return sum(_cached_nbytes(path) for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _cached_nbytes(path: Path) -> int:
    size_nbytes = path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        address = _LIBC.mmap(None, size_nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"mmap {path}")
    try:
        pages = (ctypes.c_ubyte * (-(-size_nbytes // mmap.PAGESIZE)))()
        if _LIBC.mincore(address, size_nbytes, pages):
            raise OSError(ctypes.get_errno(), f"mincore {path}")
    finally:
        _LIBC.munmap(address, size_nbytes)
    # The lowest bit tells; the others are reserved.
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
