"""Space taken and zeroed beforehand, and files without names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.config import SwapBlock
from nvmeswap.errors import SwapSpaceError

MiB = 1 << 20


def test_reserved_space_is_written_once_and_used_by_what_comes(tmp_path: Path) -> None:
    """Else the first tensors are written at half the speed, or what was prepared lies idle."""
    with TensorSwapper(tmp_path, reserve_nbytes=5 * MiB + 4096) as swapper:
        before = swapper.stats()
        assert (before.reserved_nbytes, before.allocated_nbytes) == (5 * MiB + 4096,) * 2
        assert before.reserve_s > 0
        (path,) = tmp_path.rglob("tensors.swp")
        assert path.stat().st_blocks * 512 >= 5 * MiB  # taken
        assert path.read_bytes() == bytes(5 * MiB + 4096)
        tensor = torch.arange(5 * MiB // 4, dtype=torch.int32)
        swapper.swap_out("tensor", tensor)
        assert torch.equal(swapper.swap_in("tensor"), tensor)
        assert swapper.stats().allocated_nbytes == 5 * MiB + 4096
        swapper.swap_out("more", tensor)  # beyond it the file grows as ever
        assert torch.equal(swapper.swap_in("more"), tensor)
        assert swapper.stats().reserved_nbytes == 5 * MiB + 4096


def test_reserving_more_than_there_is_leaves_nothing_behind(tmp_path: Path) -> None:
    """Else a wrong number fills the disk that others use."""
    free_nbytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(SwapSpaceError) as raised:
        TensorSwapper(tmp_path, reserve_nbytes=free_nbytes + (1 << 40))
    assert raised.value.wanted_nbytes is not None
    assert not list(tmp_path.rglob("*.swp"))


def test_ephemeral_files_have_no_name_and_work_all_the_same(tmp_path: Path) -> None:
    """Else another process of this user can open the weights by name."""
    with TensorSwapper(tmp_path, swap=SwapBlock(ephemeral=True)) as swapper:
        tensors = {str(i): torch.full((70_000,), i) for i in range(200)}  # grows after unlinking
        swapper.swap_out_many(tensors)
        assert not list(tmp_path.rglob("*.swp"))
        assert all(torch.equal(swapper.swap_in(key), tensors[key]) for key in tensors)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]


def test_space_of_an_ephemeral_file_comes_back_when_its_process_is_killed(tmp_path: Path) -> None:
    """Else a killed run keeps the disk full until the next one starts."""
    program = f"""
import os, signal, torch
from nvmeswap import TensorSwapper
from nvmeswap.config import SwapBlock
swapper = TensorSwapper({str(tmp_path)!r}, swap=SwapBlock(ephemeral=True))
swapper.swap_out("tensor", torch.zeros(16 << 20, dtype=torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*") if path.is_file()) * 512 < MiB


def test_reserved_zeros_are_really_written(workshop: Any, tmp_path: Path) -> None:
    """Else the space is taken, but the first write is slow all the same."""
    store = workshop.store(tmp_path)
    store.reserve("tensors.swp", 3 * MiB)
    stats = workshop.engines[0].stats()
    assert stats.write_direct_nbytes + stats.write_buffered_nbytes == 3 * MiB
