"""The C library's heap, which keeps freed memory unless it is told otherwise."""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_NBYTES = 1 << 20


def release_freed_memory() -> None:
    """Give freed heap memory back to the system; call it after something large was freed.

    glibc serves tensors of up to 32 MiB from its heap once it has seen a few freed, and then
    returns nothing that lies below a block in use: after a model of 1155 MiB had gone to NVMe, all
    of it was still resident. malloc_trim(3) walks the heap and returns every whole free page. Other
    C libraries have no such call and need none. Takes some milliseconds a GiB. Threads: any.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_large_blocks_back_when_freed() -> None:
    """From now on have blocks of a MiB and more returned to the system as they are freed.

    What FSDP2 gathers on a CPU and frees leaves holes in the heap that no aligned block of its size
    fits into again (glibc up to 2.37): a forward of 400 MB of weights, 8 MB at a time, left 950 MB
    resident, the second pass 2.2 GB. Mapped memory instead costs its page faults. For the whole
    process; whoever sets MALLOC_MMAP_THRESHOLD_ (mallopt(3)) keeps what he set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_NBYTES)
