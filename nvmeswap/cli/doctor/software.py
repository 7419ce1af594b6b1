"""Processor, Python, and the packages that matter."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

import torch

from nvmeswap.cli.doctor.finding import Finding, fail, ok, warn

# docs/design.md, "FSDP2": what nvmeswap was written against.
_OLDEST_TORCH, _NEWEST_TORCH = (2, 11), (2, 14)


def check() -> Iterator[Finding]:
    """Nothing here is slow."""
    yield _cores()
    yield torch_version(torch.__version__)
    yield ok("python", platform.python_version(), version=platform.python_version())
    yield _deepspeed()


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count == 1:
        return warn("processor", "1 core: moving, updating and computing take turns",
                    "give the process more cores (taskset, docker --cpus)", core_count=count)
    return ok("processor", f"{count} cores", core_count=count)


def torch_version(version: str) -> Finding:
    """Judged by its first two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    oldest, newest = (".".join(map(str, each)) for each in (_OLDEST_TORCH, _NEWEST_TORCH))
    if found < _OLDEST_TORCH:
        return fail("torch", f"{version} is older than {oldest}",
                    f"pip install 'torch>={oldest}'", version=version)
    if found > _NEWEST_TORCH:
        return warn("torch", f"{version} is newer than {newest}, the last that was tried",
                    "run the tests of nvmeswap with it (./tools/test)", version=version)
    return ok("torch", version, version=version)


def _deepspeed() -> Finding:
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return ok("deepspeed", "not installed: only nvmeswap.deepspeed needs it", version=None)
    return ok("deepspeed", version, version=version)
