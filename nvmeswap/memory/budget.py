"""From shard sizes to slot classes, and the check that the memory is there before any is taken."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch

from nvmeswap.errors import SwapBudgetError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.memory import cgroup
from nvmeswap.memory.locking import can_mlock, warn_pageable
from nvmeswap.memory.slot import SlotClass

_MERGE_UP_TO = 1.25  # arbitrary: few classes, so that slots are shared, against a quarter wasted


def slot_classes(
    sizes: Iterable[int], *, count: int, alignment_nbytes: int = 4096
) -> list[SlotClass]:
    """Slot classes for shards of these sizes in bytes, smallest first; empty shards need none.

    From the largest size down, every size within 25 % of a class's largest joins that class. A
    class gets `count` slots, or as many as it has shards if those are fewer. For instance ten
    shards of 1 MB and one of 8 MB with count 4 give 4 slots of 1 MB and 1 slot of 8 MB.
    """
    assert count > 0
    histogram = Counter(
        padded_nbytes(nbytes, alignment_nbytes) for nbytes in sizes if nbytes > 0
    )
    shard_counts: dict[int, int] = {}
    largest = 0
    for nbytes in sorted(histogram, reverse=True):
        if nbytes * _MERGE_UP_TO < largest or not largest:
            largest = nbytes
        shard_counts[largest] = shard_counts.get(largest, 0) + histogram[nbytes]
    return [
        SlotClass(nbytes, min(count, shard_counts[nbytes])) for nbytes in sorted(shard_counts)
    ]


def exact_slot_classes(sizes: Iterable[int], *, alignment_nbytes: int = 4096) -> list[SlotClass]:
    """A slot for each of these sizes in bytes, smallest first: for what stays in memory."""
    histogram = Counter(padded_nbytes(nbytes, alignment_nbytes) for nbytes in sizes if nbytes > 0)
    return [SlotClass(nbytes, histogram[nbytes]) for nbytes in sorted(histogram)]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What this process can still take, and which limit says so: "MemAvailable",
    "cgroup memory.max" (version 1's limit_in_bytes too), "RLIMIT_AS" or "RLIMIT_DATA"."""

    available_nbytes: int
    limit: str


def available_host_memory() -> HostMemory:
    """The tightest of what limits this process's memory right now. Does not block."""
    rooms = {"MemAvailable": int(psutil.virtual_memory().available)}
    cgroup_nbytes = cgroup.headroom_nbytes()
    if cgroup_nbytes is not None:
        rooms["cgroup memory.max"] = cgroup_nbytes
    used = psutil.Process().memory_info()
    for name, kind, used_nbytes in (
        ("RLIMIT_AS", resource.RLIMIT_AS, used.vms),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, used.data),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            rooms[name] = max(0, soft - used_nbytes)
    limit = min(rooms, key=lambda name: rooms[name])
    return HostMemory(rooms[limit], limit)


def preflight(
    *,
    wanted_nbytes: int,
    smallest_nbytes: int,
    budget_nbytes: int | None,
    pin_memory: bool,
    what: str,
) -> None:
    """Refuses memory that is not there, before any of it is taken. Does not block.

    Args: `wanted_nbytes`, what is about to be allocated; `smallest_nbytes`, the least that works;
    `budget_nbytes`, the user's own limit (None: only the machine's); `what`, the caller's noun.
    Raises SwapBudgetError naming the amounts, the binding limit and the fix. Warns when page-locked
    memory is wanted that `ulimit -l` forbids and that no GPU driver will lock.
    """
    assert smallest_nbytes <= wanted_nbytes
    room = available_host_memory()
    if budget_nbytes is not None and budget_nbytes < room.available_nbytes:
        room = HostMemory(budget_nbytes, "the memory budget set by the user")
    if wanted_nbytes > room.available_nbytes:
        kind = "page-locked memory" if pin_memory else "memory"
        raise SwapBudgetError(
            f"{what}: not enough host memory",
            wanted_nbytes=wanted_nbytes,
            available_nbytes=room.available_nbytes,
            smallest_nbytes=smallest_nbytes,
            cause=f"{kind} is limited by {room.limit}; the smallest that works is "
            f"{smallest_nbytes:_} bytes",
            fix=_fix(smallest_nbytes, room.available_nbytes, pin_memory),
        )
    if pin_memory and not torch.cuda.is_available() and not can_mlock(wanted_nbytes):
        warn_pageable(wanted_nbytes)


def _fix(smallest_nbytes: int, available_nbytes: int, pin_memory: bool) -> str:
    if smallest_nbytes <= available_nbytes:
        fix = f"lower the buffer count or size: {smallest_nbytes:_} bytes work and fit"
    else:
        fix = f"free memory or raise the limit: at least {smallest_nbytes:_} bytes are needed"
    if pin_memory:
        fix += (
            '; page-locked memory can\'t be swapped out by the system, "pin_memory": false makes '
            "it swappable"
        )
    return fix
