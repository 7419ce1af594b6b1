"""Host memory and GPU: how much there is, and whether it can be page-locked."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator

import psutil
import torch

from nvmeswap.cli.doctor.finding import Finding, fail, ok, warn
from nvmeswap.memory import cgroup
from nvmeswap.memory.arena import Arena, LockMode
from nvmeswap.memory.budget import available_host_memory
from nvmeswap.memory.locking import can_mlock

_TRIED_NBYTES = 2 << 20


def check(need_nbytes: int) -> Iterator[Finding]:
    """`need_nbytes`: the swap memory of one rank."""
    yield _available(need_nbytes)
    gpu = _gpu()
    yield gpu
    yield _memlock(need_nbytes, by_cuda=gpu.facts.get("pinned") is True)


def _available(need_nbytes: int) -> Finding:
    room = available_host_memory()
    limit = cgroup.headroom_nbytes()
    facts = {"available_nbytes": room.available_nbytes, "limit": room.limit,
             "total_nbytes": int(psutil.virtual_memory().total),
             "cgroup_headroom_nbytes": limit, "needed_nbytes": need_nbytes}
    what = f"{room.available_nbytes:_} bytes can be taken, limited by {room.limit}"
    if room.available_nbytes < need_nbytes:
        return fail("memory", f"{what}; {need_nbytes:_} are needed",
                    "free memory or raise that limit, or lower buffer_count, max_in_cpu and "
                    "sub_group_size (docs/howto/memory_budget.md)", **facts)
    return ok("memory", what, **facts)


def _memlock(need_nbytes: int, *, by_cuda: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    facts = {"limit_nbytes": limit, "needed_nbytes": need_nbytes, "by_cuda": by_cuda}
    allowed = "any amount" if limit is None else f"{limit:_} bytes"
    what = f"`ulimit -l` allows {allowed}"
    if by_cuda:
        return ok("memlock", f"{what}; CUDA locks without it", **facts)
    if can_mlock(need_nbytes):
        return ok("memlock", what, **facts)
    return warn(
        "memlock", f"{what}, {need_nbytes:_} bytes of swap memory are to be page-locked: they will "
        "stay pageable, which is slower. (Page-locked memory can't be swapped out by the system.)",
        'ulimit -l unlimited (docker run --ulimit memlock=-1), or "pin_memory": false', **facts)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return ok("gpu", "none that torch can use: runs compute on the processor", available=False)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # told below
        arena = Arena(_TRIED_NBYTES)
    is_pinned = arena.lock_mode is LockMode.CUDA
    arena.close()
    facts = {"available": True, "names": names, "pinned": is_pinned}
    if is_pinned:
        return ok("gpu", f"{', '.join(names)}; host memory can be registered with it", **facts)
    return warn("gpu", f"{', '.join(names)}; it refuses to register host memory, so copies wait",
                "update the driver (WSL2 has this limit), or set \"pin_memory\": false", **facts)
