"""A folder that is to be swapped to: found out by doing it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nvmeswap.cli.bench.device import device_of
from nvmeswap.cli.doctor.finding import Finding, fail, ok, warn
from nvmeswap.errors import SwapError
from nvmeswap.io.filesystem import filesystem_note
from nvmeswap.io.gds import probe_gds
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.store.owner import look_at_owners

_LEAST_FREE_NBYTES = 16 << 30  # arbitrary: 1 B parameters take about 14 GB


def check(folder: Path) -> Iterator[Finding]:
    """All about a folder; only the first if it can't be written."""
    try:
        probe = probe_folder(folder)
    except SwapError as error:
        cause = "" if error.cause is None else f" ({error.cause})"
        yield fail("folder", f"{error.what}{cause}", error.fix or "name another folder",
                   path=str(folder), uid=os.geteuid(), errno=error.errno)
        return
    facts = folder.stat()
    yield ok("folder", f"{folder} can be written; owner {facts.st_uid}, mode "
             f"{stat.filemode(facts.st_mode)}", path=str(folder), uid=facts.st_uid,
             mode=facts.st_mode & 0o7777)
    yield _filesystem(folder, probe)
    yield _direct(probe)
    yield _backend(probe)
    yield _gds(folder)
    yield _space(folder)
    yield from _owners(folder)


def _filesystem(folder: Path, probe: FolderProbe) -> Finding:
    device = device_of(folder)
    note = filesystem_note(probe.filesystem)
    facts = {"filesystem": probe.filesystem, "device": device.name,
             "link_gb_per_s": device.link_gb_per_s}
    if note is not None:
        return warn("filesystem", f"{probe.filesystem}: {note}",
                    "use a folder on ext4 or xfs on a local NVMe drive", **facts)
    link = "" if device.link_gb_per_s is None else f", link {device.link_gb_per_s:.1f} GB/s"
    return ok("filesystem", f"{probe.filesystem} on {device.name or 'no block device'}{link}",
              **facts)


def _direct(probe: FolderProbe) -> Finding:
    facts = {"direct": probe.direct, "offset_alignment_nbytes": probe.offset_alignment_nbytes,
             "memory_alignment_nbytes": probe.memory_alignment_nbytes}
    if not probe.direct:
        return warn("direct I/O", "refused: bytes go through the page cache",
                    "use a folder on ext4 or xfs", **facts)
    return ok("direct I/O", f"aligned to {probe.offset_alignment_nbytes} bytes in the file, "
              f"{probe.memory_alignment_nbytes} in memory", **facts)


def _backend(probe: FolderProbe) -> Finding:
    refused = {refusal.backend: refusal.reason for refusal in probe.refused}
    why = "".join(f"; {name} refused: {reason}" for name, reason in refused.items())
    facts = {"backend": probe.backend, "refused": refused}
    if "uring" in refused and filesystem_note(probe.filesystem) is None:
        return warn(
            "backend", f"{probe.backend}{why}",
            "allow io_uring: kernel 5.6 or newer, sysctl kernel.io_uring_disabled=0, and in a "
            'container a seccomp profile with io_uring_setup; or set "nvmeswap": '
            f'{{"backend": "{probe.backend}"}} to say that this is meant', **facts)
    return ok("backend", f"{probe.backend}{why}", **facts)


def _gds(folder: Path) -> Finding:
    probe = probe_gds(folder)
    facts = {"mode": probe.mode, "reason": probe.reason}
    return ok("gpudirect storage", probe.reason or f'"use_gds" works in mode "{probe.mode}"',
              **facts)


def _space(folder: Path) -> Finding:
    space = os.statvfs(folder)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    what = f"{free:_} of {total:_} bytes are free"
    if free < _LEAST_FREE_NBYTES:
        return warn("space", what, "free some; `nvmeswap plan` says how much a run takes",
                    free_nbytes=free, total_nbytes=total)
    return ok("space", what, free_nbytes=free, total_nbytes=total)


def _owners(folder: Path) -> Iterator[Finding]:
    ranks = look_at_owners(folder)
    live = [rank for rank in ranks if rank.alive]
    dead = [rank for rank in ranks if not rank.alive]
    facts = {
        name: [{"folder": str(r.folder), "pid": r.pid, "nbytes": r.nbytes} for r in some]
        for name, some in (("live", live), ("stale", dead))
    }
    told = ", ".join(f"{rank.folder.parent.name}/{rank.folder.name} of pid {rank.pid}"
                     for rank in live)
    what = f"live: {told}" if live else "none is live"
    if dead:
        nbytes = sum(rank.nbytes for rank in dead)
        yield warn("runs", f"{what}; {len(dead)} rank folders of dead runs hold {nbytes:_} bytes",
                   "nothing: the next run there removes them; or "
                   f"rm -r {' '.join(str(rank.folder) for rank in dead)}", **facts)
    else:
        yield ok("runs", what, **facts)
