"""No room for a checkpoint: known before anything is written, or found in the middle."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import nvmeswap.zero3
from nvmeswap.errors import SwapSpaceError
from tests.zero3.checkpoint_ranks import everything, start, train, unequal


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """8 MiB in memory; skips where mounting is forbidden."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_leaves_the_older_one_and_nothing_else(
    one_rank: None, small_filesystem: Path, tmp_path: Path
) -> None:
    """field case K01"""
    (tmp_path / "nvme").mkdir()
    model, optimizer = start("bf16 beside fp32", tmp_path / "nvme")
    train(model, optimizer, 0, 1)
    folder = small_filesystem / "saved"
    first = nvmeswap.zero3.save(model, optimizer, folder).wait()
    expected = everything(model, optimizer)
    train(model, optimizer, 1, 1)
    used_nbytes = sum(path.stat().st_size for path in first.iterdir())
    filler = small_filesystem / "filler"
    for missing_nbytes in (used_nbytes // 2, 16_000):  # of all its bytes, of DCP's own alone
        free_nbytes = shutil.disk_usage(small_filesystem).free
        filler.write_bytes(bytes(max(0, free_nbytes - used_nbytes + missing_nbytes)))
        with pytest.raises(SwapSpaceError):
            nvmeswap.zero3.save(model, optimizer, folder)
        assert {path.name for path in folder.iterdir()} == {".lock", first.name}
        filler.unlink()
    assert nvmeswap.zero3.load(model, optimizer, folder).path == first
    assert unequal(everything(model, optimizer), expected) == []
    nvmeswap.zero3.save(model, optimizer, folder, step=2)
    optimizer.close()
