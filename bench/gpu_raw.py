"""The rate of the drive without us: direct preadv and pwritev from Python threads.

Eight threads, each with a block of 4 MiB on 2 MiB pages. Files are written once before they are
measured, since a first write is slower.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from report import Samples

from nvmeswap.cli.bench.usage import Usage

_THREADS = 8
_BLOCK_NBYTES = 4 << 20
_HUGE_PAGE_NBYTES = 2 << 20


class RawFile:
    """A file of whole blocks, at least one."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.nbytes = max(1, nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        self._buffers = _huge_buffers(_THREADS)
        self._pool = ThreadPoolExecutor(_THREADS)
        self.write()

    def read(self, nbytes: int | None = None) -> Usage:
        return self._run(os.preadv, nbytes)

    def write(self, nbytes: int | None = None) -> Usage:
        return self._run(os.pwritev, nbytes)

    def run(self) -> Samples:
        """A variant of a round."""
        return {"write": self.write(), "read": self.read()}

    def _run(self, move: Callable[..., int], nbytes: int | None) -> Usage:
        """The first `nbytes`, rounded to blocks; all by default."""
        wanted = self.nbytes if nbytes is None else min(nbytes, self.nbytes)
        count = max(1, round(wanted / _BLOCK_NBYTES))
        numbers = itertools.count()  # its `next` is one step for all threads

        def work(buffer: memoryview) -> None:
            while (number := next(numbers)) < count:
                done = move(self._file, [buffer], number * _BLOCK_NBYTES)
                if done != _BLOCK_NBYTES:
                    raise OSError(f"{done} bytes moved instead of {_BLOCK_NBYTES}")

        began_s = time.perf_counter()
        for each in [self._pool.submit(work, buffer) for buffer in self._buffers]:
            each.result()
        return Usage(count * _BLOCK_NBYTES, time.perf_counter() - began_s, 0.0)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)


@dataclass(frozen=True)
class Traffic:
    """What some bytes would take the drive alone."""

    read_gb_per_s: float
    write_gb_per_s: float
    at_once_s: float
    in_turn_s: float

    @property
    def floor_s(self) -> float:
        """The better of both ways."""
        return min(self.at_once_s, self.in_turn_s)


class RawTraffic:
    """Two files, of which one is read while the other is written, or one after the other."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        folder.mkdir()
        self._source = RawFile(folder / "source", nbytes)
        self._target = RawFile(folder / "target", nbytes)

    def measure(self, read_nbytes: int, write_nbytes: int) -> Traffic:
        """For so many bytes: as large a part of them as the files hold is moved, in this
        proportion."""
        scale = max(read_nbytes, write_nbytes, 1) / self._source.nbytes
        parts = round(read_nbytes / scale), round(write_nbytes / scale)
        read, write = self._source.read(), self._target.write()
        began_s = time.perf_counter()
        with ThreadPoolExecutor(2) as both:
            running = [both.submit(move, part) for move, part in
                       zip((self._source.read, self._target.write), parts, strict=True) if part]
            moved = sum(each.result().nbytes for each in running)
        at_once_s = time.perf_counter() - began_s
        return Traffic(
            read.gb_per_s, write.gb_per_s,
            at_once_s=at_once_s * (read_nbytes + write_nbytes) / max(moved, 1),
            in_turn_s=read_nbytes / 1e9 / read.gb_per_s + write_nbytes / 1e9 / write.gb_per_s,
        )

    def close(self) -> None:
        self._source.close()
        self._target.close()


def _huge_buffers(count: int) -> Sequence[memoryview]:
    mapping = mmap.mmap(-1, count * _BLOCK_NBYTES + _HUGE_PAGE_NBYTES,
                        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(mapping)
    start = -_address(whole) % _HUGE_PAGE_NBYTES
    noise = os.urandom(_BLOCK_NBYTES)  # a drive might not store zeros
    buffers = []
    for index in range(count):
        begin = start + index * _BLOCK_NBYTES
        buffers.append(whole[begin : begin + _BLOCK_NBYTES])
        buffers[-1][:] = noise
    return buffers


def _address(view: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data)
