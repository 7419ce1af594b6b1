"""Storages whose memory comes and goes while the object, and every tensor over it, stays.

Facts (kernel 6.18). On a GPU torch's own `resize_(0)` frees a storage's memory to the caching
allocator, and `resize_(nbytes)` takes some again. On the CPU that would be an malloc of fresh pages
each time: zeroing 64 MiB in 4 KiB faults takes longer than reading them from a drive. So there a
storage is a mapping of its own on 2 MiB pages. What one gives up the next of its size gets, also in
the next pass, by mremap: pages move, nothing is zeroed or copied, and MREMAP_DONTUNMAP (kernel 5.7)
keeps the addresses that they leave. Memory that is away is not to be read: it faults, as a freed
one would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

import torch

from nvmeswap.memory.arena import HUGE_PAGE_NBYTES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4  # linux/mman.h
_MAP_FAILED = ctypes.c_void_p(-1).value
_MOST_SPARE = 2  # arbitrary: one unit has just gone when the next one comes


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


class SparePages:
    """Storages of the host that were freed, and still have their pages, for the next of their
    size. Not thread-safe."""

    def __init__(self) -> None:
        self._spare: list[HostStorage] = []

    def keep(self, storage: HostStorage) -> None:
        self._spare.append(storage)
        while len(self._spare) > _MOST_SPARE:
            self._spare.pop(0).discard()

    def take(self, wanted: HostStorage) -> HostStorage | None:
        """One whose pages `wanted` can have; itself, if it is among them."""
        for spare in [wanted, *self._spare]:
            if spare in self._spare and spare.nbytes == wanted.nbytes:
                self._spare.remove(spare)
                return spare
        return None

    def discard(self) -> None:
        """Give all of them back to the kernel."""
        while self._spare:
            self._spare.pop().discard()


class HostStorage:
    """Anonymous memory at a fixed address. Whoever holds a tensor over it keeps the mapping."""

    def __init__(self, nbytes: int, spare: SparePages) -> None:
        self.nbytes = nbytes
        self.storage = torch.UntypedStorage(nbytes)
        self._spare = spare
        self._mapping: mmap.mmap | None = None
        if not nbytes:
            return
        page_nbytes = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else mmap.PAGESIZE
        self._mapped_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        slack_nbytes = page_nbytes - mmap.PAGESIZE  # address space only
        self._mapping = mmap.mmap(
            -1, self._mapped_nbytes + slack_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % page_nbytes
        self._address = whole.data_ptr() + self._start
        self.storage = torch.frombuffer(
            self._mapping, dtype=torch.uint8, offset=self._start, count=nbytes
        ).untyped_storage()
        if nbytes >= HUGE_PAGE_NBYTES:
            huge_nbytes = nbytes // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
            self._mapping.madvise(mmap.MADV_HUGEPAGE, self._start, huge_nbytes)

    def take(self) -> None:
        if self._mapping is None:
            return
        spare = self._spare.take(self)
        if spare is self:
            return
        if spare is None or not self._get_pages_of(spare):
            self._protect(_PROT_READ_WRITE)

    def free(self) -> None:
        if self._mapping is not None:
            self._spare.keep(self)

    def discard(self) -> None:
        """Give the pages back to the kernel."""
        assert self._mapping is not None
        self._mapping.madvise(mmap.MADV_DONTNEED, self._start, self._mapped_nbytes)
        self._protect(_PROT_NONE)

    def _get_pages_of(self, other: HostStorage) -> bool:
        """Move another's pages here; False, and they are given back, where the kernel can't."""
        moved = _libc.mremap(
            ctypes.c_void_p(other._address), ctypes.c_size_t(self._mapped_nbytes),
            ctypes.c_size_t(self._mapped_nbytes),
            ctypes.c_int(_MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP),
            ctypes.c_void_p(self._address),
        )
        if moved == _MAP_FAILED:
            other.discard()
            return False
        other._protect(_PROT_NONE)
        return True

    def _protect(self, protection: int) -> None:
        address, nbytes = ctypes.c_void_p(self._address), ctypes.c_size_t(self._mapped_nbytes)
        if _libc.mprotect(address, nbytes, protection) != 0:
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number))


def coming_storage(nbytes: int, device: torch.device, spare: SparePages) -> ComingStorage:
    """A storage of so many bytes, with its memory."""
    return HostStorage(nbytes, spare) if device.type == "cpu" else GpuStorage(nbytes, device)
