"""The arena takes exactly what it was asked for, gives it back, and survives forks."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.errors import SwapBudgetError
from nvmeswap.memory.arena import HUGE_PAGE_NBYTES, Arena, LockMode, huge_page_nbytes

MIB = 1 << 20


def status_nbytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def drop_lock_rights() -> None:
    """Nobody, with 64 KiB of lockable memory; for a child process."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    os.setgid(65534)
    os.setuid(65534)


@pytest.mark.parametrize("nbytes", [(13 * MIB) + 5, (3 * MIB) + 4097, 600_001, 8 * MIB])
def test_arena_when_pinned_locks_no_more_than_asked(nbytes: int) -> None:
    """torch's pinned allocator rounds 129.5 MB up to 256 MB; a training host runs out of memory."""
    # field case B06: right at most 1.02 times, wrong 2 times
    before = status_nbytes("VmLck")
    arenas = [Arena(nbytes) for _ in range(5)]
    if arenas[0].lock_mode is LockMode.PAGEABLE:
        pytest.skip("this user may not lock memory")
    asked = 5 * nbytes
    if arenas[0].lock_mode is LockMode.MLOCK:
        assert status_nbytes("VmLck") - before <= 1.02 * asked
    assert asked <= sum(arena.locked_nbytes for arena in arenas) <= 1.02 * asked
    for arena in arenas:
        arena.close()
    assert status_nbytes("VmLck") == before


@pytest.mark.parametrize("nbytes", [3 * MIB + 4097, 17 * MIB])
def test_arena_when_populated_is_resident_to_the_page_and_no_further(nbytes: int) -> None:
    """A tail on a huge page would take up to 2 MiB more than the budget says."""
    arena = Arena(nbytes, pin_memory=False)
    first = arena.memory.data_ptr()
    inside, resident_nbytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            low, high = (int(bound, 16) for bound in head.split("-"))
            inside = low < first + nbytes + 4096 and first < high
        elif inside and head == "Rss:":
            resident_nbytes += int(line.split()[1]) * 1024
    assert nbytes <= resident_nbytes <= nbytes + 4096


def test_arena_when_pin_memory_is_false_locks_nothing() -> None:
    """A host that can't pin, and whose user said so, must not be pinned all the same."""
    # field case B04: right 0 locked bytes
    before = status_nbytes("VmLck")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = Arena(4 * MIB, pin_memory=False)
    assert arena.lock_mode is LockMode.PAGEABLE and arena.locked_nbytes == 0
    assert status_nbytes("VmLck") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop the right to lock memory")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA locks memory whatever `ulimit -l` says")
def test_arena_when_locking_is_forbidden_stays_pageable_with_one_warning(
    in_child: Callable[[Callable[[], Any]], Any],
) -> None:
    """A container with a small `ulimit -l` must train, slower, and say why."""

    # field case B03
    def body() -> tuple[str, int, list[str]]:
        drop_lock_rights()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arena = Arena(4 * MIB)
        arena.memory[:100].fill_(7)
        return arena.lock_mode.name, arena.locked_nbytes, [str(each.message) for each in caught]

    mode, locked_nbytes, (message,) = in_child(body)
    assert (mode, locked_nbytes) == ("PAGEABLE", 0)
    assert "ulimit -l" in message and "pin_memory" in message


def test_arena_when_created_and_closed_repeatedly_leaks_nothing() -> None:
    """Swappers made and dropped in a notebook would fill the host with locked memory."""
    # field case B11: right 0 bytes more after 20 swappers
    locked, mapped = status_nbytes("VmLck"), status_nbytes("VmSize")
    for _ in range(20):
        arena = Arena(16 * MIB)
        arena.close()
        arena.close()
    for _ in range(20):
        arena = Arena(16 * MIB)  # dropped without close
    del arena
    gc.collect()
    assert status_nbytes("VmLck") == locked
    assert status_nbytes("VmSize") - mapped < 16 * MIB


def test_arena_when_fresh_is_zero_and_starts_on_a_huge_page() -> None:
    """Adam's moments would begin as garbage, and the disk would run at a third of its speed."""
    # field case B11: right 0, wrong whatever the allocator left
    arena = Arena(8 * MIB, pin_memory=False)
    assert arena.memory.dtype is torch.uint8 and arena.memory.shape == (8 * MIB,)
    assert not arena.memory.any()
    assert arena.memory.data_ptr() % HUGE_PAGE_NBYTES == 0
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("huge pages are switched off on this machine")
    assert huge_page_nbytes(arena.memory.data_ptr()) >= 8 * MIB


def test_arena_when_closed_keeps_memory_for_views_and_unmaps_after_the_last() -> None:
    """A tensor that outlives its arena would otherwise crash the process when it is read."""
    arena = Arena(4 * MIB)
    view = arena.memory[4096:8192]
    view.fill_(42)
    address = view.data_ptr()
    arena.close()
    assert arena.locked_nbytes == 0
    assert bool((view == 42).all())
    del view
    gc.collect()
    assert not is_mapped(address)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 2 * MIB])
def test_arena_when_small_has_the_size_asked_for(nbytes: int) -> None:
    """A rank whose shards are all empty still starts."""
    assert Arena(nbytes, pin_memory=False).memory.shape == (nbytes,)


def test_arena_when_the_kernel_refuses_raises_typed() -> None:
    """An OSError without numbers tells nobody which setting to lower."""
    with pytest.raises(SwapBudgetError) as caught:
        Arena(1 << 60, pin_memory=False)
    assert caught.value.wanted_nbytes == 1 << 60


def test_forked_child_when_it_drops_the_arena_unmaps_nothing_of_its_own() -> None:
    """A DataLoader worker copies a pinned arena outright, or later loses memory that lies where the
    arena was in its parent, and crashes."""
    arena = Arena(4 * MIB)
    arena.memory.fill_(5)
    address = arena.memory.data_ptr()
    pid = os.fork()
    if pid == 0:
        absent = not is_mapped(address)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        fixed = 0x10  # MAP_FIXED
        got = libc.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(4 * MIB), mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, ctypes.c_long(0),
        )
        ctypes.memset(got, 9, 4 * MIB)
        del arena
        gc.collect()
        os._exit(0 if absent and ctypes.string_at(got, 1) == b"\x09" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bool((arena.memory == 5).all())
