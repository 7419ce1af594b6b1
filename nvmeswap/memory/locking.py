"""Page-locking: which way a piece of memory can be kept from being swapped out, and doing it.

Facts. Page-locked memory can't be swapped out by the kernel, so a GPU copy can run without the CPU
waiting for it, and direct I/O needs no page faults. `cudaHostRegister` page-locks by itself and is
not limited by RLIMIT_MEMLOCK; mlock is, unless the process has CAP_IPC_LOCK (capability 14). Both
must be undone before the memory is unmapped: CUDA keeps its own table of registered ranges.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import resource
import warnings
from pathlib import Path

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_CAP_IPC_LOCK = 14


class LockMode(enum.Enum):
    """How an arena's pages are kept in memory."""

    CUDA = "cuda"  # registered with CUDA: page-locked, GPU copies run by themselves
    MLOCK = "mlock"  # page-locked by the kernel alone
    PAGEABLE = "pageable"  # not page-locked: slower GPU copies, but no limits to obey


def lock(address: int, nbytes: int) -> LockMode:
    """Page-locks the pages in the best way that works here; PAGEABLE, with a warning, if none does.

    Blocks for as long as the kernel takes; never raises for a refusal. Thread-safe.
    """
    if torch.cuda.is_available() and _cuda_register(address, nbytes):
        return LockMode.CUDA
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0:
        return LockMode.MLOCK
    warn_pageable(nbytes)
    return LockMode.PAGEABLE


def unlock(mode: LockMode, address: int, nbytes: int, owner_pid: int) -> None:
    """Undoes `lock`; waits for the GPU. Does nothing in a forked child, which has neither the pages
    nor CUDA."""
    if os.getpid() != owner_pid:
        return
    if mode is LockMode.CUDA:
        with contextlib.suppress(RuntimeError):  # at exit CUDA may be gone, and its copies with it
            torch.cuda.synchronize()  # copies from or to the pages may be under way
        torch.cuda.cudart().cudaHostUnregister(address)
    elif mode is LockMode.MLOCK:
        _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def can_mlock(nbytes: int) -> bool:
    """Whether mlock of that many more bytes is allowed, by limit or by capability."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _has_ipc_lock_capability():
        return True
    return _status_field("VmLck", base=10) * 1024 + nbytes <= soft


def warn_pageable(nbytes: int) -> None:
    """Says once per amount (Python's warning filter folds repeats) that memory stays pageable."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    warnings.warn(
        f"{nbytes:_} bytes of swap memory can't be page-locked (`ulimit -l` allows "
        f"{'any amount' if soft == resource.RLIM_INFINITY else f'{soft:_} bytes'}): they stay "
        "pageable, which is correct but slower. Raise `ulimit -l`, or set \"pin_memory\": false "
        "to say that this is meant.",
        RuntimeWarning,
        stacklevel=1,
    )


def _cuda_register(address: int, nbytes: int) -> bool:
    try:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0
    except RuntimeError:  # WSL2 and old drivers refuse to pin
        return False


def _has_ipc_lock_capability() -> bool:
    return bool(_status_field("CapEff", base=16) >> _CAP_IPC_LOCK & 1)


def _status_field(name: str, base: int) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1], base)
    return 0
