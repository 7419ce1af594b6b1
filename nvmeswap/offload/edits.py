"""Whether a mapped file was written to, whoever did it and however.

Facts (Linux). A write to a private mapping gives the process a page of its own. The entry of a page
in /proc/self/pagemap says whether it is present (bit 63) or swapped out (62), and whether it is the
file's (61). No version counter is needed, which `weight.data += delta` (adapters are merged so) and
torch's fused optimizers (2.13) do not move.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os

import torch

_ENTRY_NBYTES = 8
_PIECE = 1 << 16  # entries looked at together: of 256 MiB


@functools.cache
def can_be_seen() -> bool:
    """Whether the kernel tells of own pages here (some sandboxes do not)."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page[0] = 1
    try:
        return has_own_pages(torch.frombuffer(page, dtype=torch.uint8).data_ptr(), mmap.PAGESIZE)
    except OSError:
        return False


def has_own_pages(address: int, nbytes: int) -> bool:
    """True if one of these pages (the address is a page's) is the process's own. Raises OSError
    where the kernel does not say, or no file can be opened."""
    page, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        while page < end:
            pagemap.seek(page * _ENTRY_NBYTES)
            raw = bytearray(pagemap.read(min(_PIECE, end - page) * _ENTRY_NBYTES))
            count = len(raw) // _ENTRY_NBYTES
            if not count:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            entries = torch.frombuffer(raw, dtype=torch.int64, count=count)
            is_there = (entries >> 62) & 3 != 0
            is_the_files = (entries >> 61) & 1 != 0
            if bool((is_there & ~is_the_files).any()):
                return True
            page += count
    return False
