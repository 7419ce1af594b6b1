"""The machine that figures were measured on: without it they mean nothing."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

import nvmeswap
from nvmeswap.cli.bench.device import device_of
from nvmeswap.io.filesystem import filesystem_type
from nvmeswap.io.probe import probe_folder


def facts(folder: Path) -> dict[str, Any]:
    """For the JSON. `load`: of the last minute, so that a busy machine shows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    probe = probe_folder(folder)
    device = device_of(folder)
    return {
        "cpu": _cpu_name(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "filesystem": filesystem_type(folder),
        "device": device.name,
        "link_gb_per_s": device.link_gb_per_s,
        **_queue(device.name),
        "backend": probe.backend,
        "direct": probe.direct,
        "memlock_nbytes": None if soft == resource.RLIM_INFINITY else soft,
        "root": os.geteuid() == 0,
        "transparent_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvmeswap": _commit(),
        "fio": _first_line("fio", "--version"),
    }


def _cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def _queue(device: str | None) -> dict[str, Any]:
    folder = Path(f"/sys/block/{device}/queue")
    names = ("scheduler", "nr_requests", "max_sectors_kb", "rotational", "write_cache")
    return {
        name: _chosen(str(folder / name)) for name in names if (folder / name).exists()
    }


def _chosen(path: str) -> str | None:
    """What a file in /sys says: of a choice, the bracketed one."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    found = re.search(r"\[(.*?)\]", text)
    return found[1] if found else text


def _commit() -> str | None:
    return _first_line("git", "-C", str(Path(nvmeswap.__file__).parent), "describe", "--always",
                       "--dirty")


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip().split("\n")[0] or None
