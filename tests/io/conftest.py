"""A swap file, aligned memory, and memory with guards around it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

MiB = 1 << 20


@pytest.fixture
def swap_path(tmp_path: Path) -> Path:
    """A sparse file of 16 MiB in a folder of its own."""
    path = tmp_path / "params.swp"
    path.touch()
    os.truncate(path, 16 * MiB)
    return path


@pytest.fixture
def random_bytes() -> Callable[..., torch.Tensor]:
    """make(nbytes, misaligned_by=0): random bytes at an address that far beyond a page's start."""

    def make(nbytes: int, misaligned_by: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(nbytes * 31 + misaligned_by)
        memory = torch.randint(0, 256, (nbytes + 8192,), dtype=torch.uint8, generator=generator)
        start = -memory.data_ptr() % 4096 + misaligned_by
        return memory[start : start + nbytes]

    return make


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB in memory; skips where mounting is forbidden."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
