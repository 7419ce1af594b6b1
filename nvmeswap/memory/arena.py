"""The one mapping that holds all swap memory.

Facts (kernel 6.18, docs/design.md has the figures). Direct I/O into 2 MiB pages runs 1.5 to 3 times
as fast as into scattered 4 KiB pages, but memory touched before MADV_HUGEPAGE stays on small ones:
so advise first, then populate. A fork copies page-locked memory outright, a second per GiB: so
MADV_DONTFORK. Then a forked child has nothing at these addresses, and whatever it maps there later
must not be unmapped when its copy of our Python objects dies: so the child keeps those for ever.
torch's own pinned allocator rounds up to powers of two: so we map it ourselves.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
import weakref
from pathlib import Path

import torch

from nvmeswap.errors import SwapBudgetError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.memory.locking import LockMode, lock, unlock

__all__ = ["Arena", "LockMode"]

HUGE_PAGE_NBYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, kernel 5.14; Python 3.11 does not name it
_WARN_HUGE_FROM_NBYTES = 64 << 20  # arbitrary: below this nobody would notice small pages

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_in_child() -> None:
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_in_child)


class Arena:
    """One anonymous mapping, on 2 MiB pages, resident from the start, page-locked where possible.

        arena = Arena(1 << 30)
        pool = Pool(arena.memory, classes, name="params")
        ...
        arena.close()

    Args: `nbytes`, the size; `pin_memory`, whether to page-lock it: by CUDA where there is a GPU,
    else by mlock, else not at all, with one warning. False locks no byte.
    Raises: SwapBudgetError when the kernel refuses the memory (ask `budget.preflight` first: a
    cgroup limit kills instead of refusing).
    Blocking: construction touches every page, about 0.13 s a GiB; close does not block.
    Threads: any thread may use the memory; construct and close in one.
    Ownership: the arena owns the page lock, and whoever holds a view of `memory` keeps the mapping.
    Keep the arena open for as long as GPU copies use its memory.
    """

    def __init__(self, nbytes: int, *, pin_memory: bool = True) -> None:
        assert nbytes >= 0
        mapped_nbytes = padded_nbytes(max(nbytes, 1), mmap.PAGESIZE)
        mapping, view = _map(mapped_nbytes)
        address = view.data_ptr()
        self.nbytes = nbytes
        self.memory = view[:nbytes]
        self.lock_mode = lock(address, mapped_nbytes) if pin_memory else LockMode.PAGEABLE
        self.locked_nbytes = 0 if self.lock_mode is LockMode.PAGEABLE else mapped_nbytes
        self._unlock = weakref.finalize(
            self, unlock, self.lock_mode, address, mapped_nbytes, os.getpid()
        )
        _mappings.add(mapping)
        _warn_if_on_small_pages(address, mapped_nbytes)

    def close(self) -> None:
        """Undoes the page lock and lets go of the memory; calling again does nothing."""
        self._unlock()
        self.locked_nbytes = 0
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")


def _map(nbytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Maps, advises and populates; exactly `nbytes` become resident."""
    slack_nbytes = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else 0  # address space only
    try:
        mapping = mmap.mmap(
            -1, nbytes + slack_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_NBYTES if slack_nbytes else 0
        mapping.madvise(mmap.MADV_DONTFORK)
        _advise_huge(mapping, start, nbytes)
        view = whole[start : start + nbytes]
        _populate(mapping, start, view)
    except OSError as error:
        raise SwapBudgetError(
            "swap memory could not be mapped",
            wanted_nbytes=nbytes,
            available_nbytes=0,
            smallest_nbytes=nbytes,
            cause=f"{errno.errorcode.get(error.errno or 0, '?')} ({error.strerror})",
            fix="lower the buffer count or size, or raise `ulimit -v`",
        ) from error
    return mapping, view


def _advise_huge(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Whole 2 MiB pages where they fit; the tail stays small, so as to take no more than asked."""
    huge_nbytes = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    try:
        if huge_nbytes:
            mapping.madvise(mmap.MADV_HUGEPAGE, start, huge_nbytes)
        if nbytes > huge_nbytes:
            mapping.madvise(mmap.MADV_NOHUGEPAGE, start + huge_nbytes, nbytes - huge_nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel built without huge pages
            raise


def _populate(mapping: mmap.mmap, start: int, view: torch.Tensor) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, view.numel())
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        view[:: mmap.PAGESIZE].zero_()  # kernels before 5.14: touch every page, in order


def _warn_if_on_small_pages(address: int, nbytes: int) -> None:
    if nbytes < _WARN_HUGE_FROM_NBYTES:
        return
    huge_nbytes = huge_page_nbytes(address)
    if huge_nbytes < nbytes * 9 // 10:
        warnings.warn(
            f"only {huge_nbytes:_} of {nbytes:_} bytes of swap memory are on 2 MiB pages, so the "
            "disk will be slower: run `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
            ", or free memory that is fragmented",
            RuntimeWarning,
            stacklevel=3,
        )


def huge_page_nbytes(address: int) -> int:
    """Bytes on huge pages in the kernel's mapping that holds `address`; 0 if it can't be known."""
    inside = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        head = line.split(maxsplit=1)[0]
        if head.endswith(":"):
            if inside and head == "AnonHugePages:":
                return int(line.split()[1]) * 1024
        else:
            first, last = (int(bound, 16) for bound in head.split("-"))
            inside = first <= address < last
    return 0
