"""The C library's heap, which keeps freed memory unless it is told otherwise."""

from __future__ import annotations

import ctypes


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
