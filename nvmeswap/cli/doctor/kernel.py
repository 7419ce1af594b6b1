"""Limits of the kernel that only show when a run starts, or with many ranks."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from nvmeswap.cli.doctor.finding import Finding, ok, warn
from nvmeswap.config import AioConfig

_RANKS = 8  # arbitrary: of a node


def check(*, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """`proc` and `sysfs`: where the kernel tells."""
    yield ok("kernel", platform.release(), release=platform.release())
    yield _uring(proc / "sys/kernel/io_uring_disabled")
    yield _aio(proc / "sys/fs")
    yield _huge_pages(sysfs / "kernel/mm/transparent_hugepage/enabled")


def _uring(switch: Path) -> Finding:
    try:
        value = int(switch.read_text())
    except (OSError, ValueError):
        return ok("io_uring", "this kernel has no switch that forbids it", io_uring_disabled=None)
    if value:
        who = "everybody" if value == 2 else "all but root and members of kernel.io_uring_group"
        return warn("io_uring", f"forbidden to {who} by sysctl kernel.io_uring_disabled={value}",
                    "sysctl -w kernel.io_uring_disabled=0 (slower backends work, too)",
                    io_uring_disabled=value)
    return ok("io_uring", "not forbidden (sysctl kernel.io_uring_disabled=0)",
              io_uring_disabled=value)


def _aio(folder: Path) -> Finding:
    try:
        used, most = (int((folder / f"aio-{name}").read_text()) for name in ("nr", "max-nr"))
    except (OSError, ValueError):
        return warn("aio", "this kernel tells no fs.aio-max-nr: it has no Linux AIO",
                    "nothing, where io_uring works")
    need = _RANKS * int(AioConfig().queue_depth)
    facts = {"aio_nr": used, "aio_max_nr": most, "needed": need}
    what = f"fs.aio-nr is {used}, fs.aio-max-nr {most}"
    if most - used < need:
        return warn("aio", f"{what}: {most - used} are left, {_RANKS} ranks would take {need}",
                    f"sysctl -w fs.aio-max-nr={max(1 << 20, used + need)} (io_uring needs none)",
                    **facts)
    return ok("aio", what, **facts)


def _huge_pages(switch: Path) -> Finding:
    try:
        chosen = re.search(r"\[(\w+)\]", switch.read_text())
    except OSError:
        chosen = None
    mode = None if chosen is None else chosen[1]
    if mode in ("always", "madvise"):
        return ok("huge pages", f"transparent huge pages: {mode}", mode=mode)
    return warn("huge pages", f"transparent huge pages: {mode or 'not in this kernel'}; drives are "
                "1.5 to 3 times slower into small pages", f"echo madvise > {switch}", mode=mode)


