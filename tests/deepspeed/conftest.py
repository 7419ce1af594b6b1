"""Filesystems that are soon full, and random bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

MIB = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small_filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """8 MiB in memory, or 16 MiB of ext4 on a loop device; skips where mounting is forbidden."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(16 * MIB)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount {request.param}: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def random_bytes() -> Callable[[int], torch.Tensor]:
    """make(nbytes): the same random bytes each time."""

    def make(nbytes: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(nbytes)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    return make
