"""Storages whose memory comes and goes while the object, and every tensor over it, stays.

Facts. On a GPU torch's own `resize_(0)` frees a storage's memory to the caching allocator, and
`resize_(nbytes)` takes some again. On the CPU that would be an malloc of fresh pages each time:
zeroing 64 MiB in 4 KiB faults takes longer than reading them from a drive. So there a storage is a
mapping of its own on 2 MiB pages, which the kernel takes back on MADV_DONTNEED. Memory that is
away is not to be read: it faults, as a freed one would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

from nvmeswap.memory.arena import HUGE_PAGE_NBYTES

_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class ComingStorage(Protocol):
    """`storage` is always the same object; its memory is there from `take` to `free`."""

    storage: torch.UntypedStorage

    def take(self) -> None:
        """Have memory, of undefined content."""

    def free(self) -> None:
        """Give it back."""


class GpuStorage:
    """Memory of torch's allocator, in the order of the stream that is current at `take`."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self.storage = torch.UntypedStorage(nbytes, device=device)

    def take(self) -> None:
        self.storage.resize_(self._nbytes)

    def free(self) -> None:
        self.storage.resize_(0)


class HostStorage:
    """Anonymous memory, mapped for good. Whoever holds a tensor over it keeps the mapping."""

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.UntypedStorage(nbytes)
        self._mapping: mmap.mmap | None = None
        if not nbytes:
            return
        slack_nbytes = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else 0  # address space only
        self._mapping = mmap.mmap(
            -1, nbytes + slack_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_NBYTES if slack_nbytes else 0
        self.storage = torch.frombuffer(
            self._mapping, dtype=torch.uint8, offset=start, count=nbytes
        ).untyped_storage()
        self._mapped_nbytes = nbytes + slack_nbytes
        self._address = whole.data_ptr()
        self._huge = (start, nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES)

    def take(self) -> None:
        if self._mapping is not None:
            self._protect(_PROT_READ_WRITE)
            start, nbytes = self._huge
            if nbytes:
                self._mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)

    def free(self) -> None:
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._protect(_PROT_NONE)

    def _protect(self, protection: int) -> None:
        address, nbytes = ctypes.c_void_p(self._address), ctypes.c_size_t(self._mapped_nbytes)
        if _libc.mprotect(address, nbytes, protection) != 0:
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number))


def coming_storage(nbytes: int, device: torch.device) -> ComingStorage:
    """A storage of so many bytes, with its memory."""
    return HostStorage(nbytes) if device.type == "cpu" else GpuStorage(nbytes, device)
