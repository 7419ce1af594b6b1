"""fio at its best, and what its JSON says.

Its own processor figures are taken: they begin where its loop begins, and without `--thread` they
are those of a process with its io workers. What fio spends on starting (half a second) would hide
what a GB costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvmeswap.cli.bench.usage import Usage

_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_HUGE_PAGE_COUNT = 64  # 128 MiB, of which 32 blocks of 512 KiB take 16


class FioError(Exception):
    """fio is missing, or failed."""


@dataclass(frozen=True)
class Job:
    """One fio job over an existing file, all of it once, or as long as `runtime_s`."""

    path: Path
    size_nbytes: int
    kind: str
    """read, write, randread or randwrite"""
    block_nbytes: int
    queue_depth: int
    engine: str = "io_uring"
    direct: bool = True
    batched: bool = False
    """Enters the kernel once for 16 blocks, and waits for 8 at a time."""
    runtime_s: float | None = None


class Fio:
    """Runs jobs. `huge_pages`: its buffers can lie on them."""

    def __init__(self, *, huge_pages: bool) -> None:
        if shutil.which("fio") is None:
            raise FioError("fio is not installed: apt-get install fio")
        self.huge_pages = huge_pages

    def run(self, jobs: Mapping[str, Job], *, at_once: bool = False) -> dict[str, Usage]:
        """One after the other, or all `at_once`, in one call of fio."""
        command = ["fio", "--output-format=json"]
        for name, job in jobs.items():
            command += [f"--name={name}", *self._arguments(job)]
            if not at_once:
                command.append("--stonewall")  # waits for the job before it
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise FioError(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
        # Warnings may stand before the JSON.
        found = json.loads(result.stdout[result.stdout.index("{") :])["jobs"]
        return {each["jobname"]: _usage(each) for each in found}

    def _arguments(self, job: Job) -> list[str]:
        arguments = [
            f"--filename={job.path}", f"--size={job.size_nbytes}", f"--rw={job.kind}",
            f"--bs={job.block_nbytes}", f"--iodepth={job.queue_depth}",
            f"--ioengine={job.engine}", f"--direct={int(job.direct)}",
            f"--iomem={'mmaphuge' if self.huge_pages else 'mmap'}",
            # Work that isn't I/O: times of each transfer, a map of blocks done, new bytes to write.
            "--gtod_reduce=1", "--norandommap=1", "--scramble_buffers=0",
            "--fallocate=none", "--allow_file_create=0",
        ]
        if job.engine == "io_uring":
            arguments += ["--fixedbufs=1", "--registerfiles=1"]
        if job.batched:
            arguments += ["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=8",
                          f"--iodepth_batch_complete_max={job.queue_depth}"]
        if job.runtime_s is not None:
            arguments += ["--time_based", f"--runtime={round(job.runtime_s * 1000)}ms"]
        return arguments


def _usage(job: Mapping[str, Any]) -> Usage:
    way = job["read"] if job["read"]["io_bytes"] else job["write"]
    share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Usage(way["io_bytes"], way["runtime"] / 1e3, share * job["job_runtime"] / 1e3)


@contextlib.contextmanager
def huge_pages() -> Iterator[bool]:
    """Reserves huge pages while inside, where root may; yields whether there are any."""
    before = int(_HUGE_PAGES.read_text())
    wanted = os.geteuid() == 0 and before < _HUGE_PAGE_COUNT
    with contextlib.suppress(OSError):  # a container's root may not
        if wanted:
            _HUGE_PAGES.write_text(str(_HUGE_PAGE_COUNT))
    try:
        yield int(_HUGE_PAGES.read_text()) >= _HUGE_PAGE_COUNT
    finally:
        with contextlib.suppress(OSError):
            if wanted:
                _HUGE_PAGES.write_text(str(before))
