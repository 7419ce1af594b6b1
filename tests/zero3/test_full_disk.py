"""A full filesystem: an error before training where it can be known, and never a wrong result."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvmeswap.zero3
from nvmeswap import SwappedAdamW, TensorSwapper
from nvmeswap.errors import SwapSpaceError
from tests.oracle import first_difference
from tests.zero3.cases import Case, run_in_ram, run_swapped

MIB = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small_filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """8 MiB in memory, or 16 MiB of ext4 on a loop device; skips where mounting is forbidden."""
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


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.swp"))


def test_model_that_does_not_fit_is_refused_before_training(
    one_rank: None, small_filesystem: Path
) -> None:
    """Peers report success on a full disk and later return zeros.  field case K01"""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3)))
    with pytest.raises(SwapSpaceError) as raised:
        nvmeswap.zero3.shard(model, Case().config(small_filesystem))
    error = raised.value
    assert error.path is not None and error.path.is_relative_to(small_filesystem)
    assert error.wanted_nbytes is not None and error.got_nbytes is not None
    assert error.wanted_nbytes > error.got_nbytes
    assert files_in(small_filesystem) == []


def test_optimizer_that_does_not_fit_is_refused_before_training(small_filesystem: Path) -> None:
    """field case K01"""
    parameter = torch.nn.Parameter(torch.zeros(4_000_000))
    with pytest.raises(SwapSpaceError):
        SwappedAdamW([parameter], nvme_path=small_filesystem)
    assert files_in(small_filesystem) == []


def test_disk_filled_by_others_during_training_changes_nothing(
    one_rank: None, small_filesystem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All space is taken at the start, so whoever fills the rest can't stop the run."""
    case = Case(bf16=True)
    original = nvmeswap.zero3.shard

    def shard_then_fill(*args: object) -> object:
        made = original(*args)  # type: ignore[arg-type]
        with pytest.raises(OSError), (small_filesystem / "hog").open("wb", buffering=0) as hog:
            while True:
                hog.write(bytes(MIB // 4))
        return made

    monkeypatch.setattr(nvmeswap.zero3, "shard", shard_then_fill)
    assert first_difference(run_swapped(case, small_filesystem), run_in_ram(case)) is None


def test_tensors_swapped_out_until_the_disk_is_full_are_all_intact(
    small_filesystem: Path,
) -> None:
    """The write that does not fit raises, its tensor and all earlier ones stay readable, and
    freed space is used again.  field cases K01, K09"""
    stored: dict[str, torch.Tensor] = {}
    with TensorSwapper(small_filesystem) as swapper:
        with pytest.raises(SwapSpaceError) as raised:
            for index in range(100):
                tensor = torch.full((300_000,), float(index))
                swapper.swap_out(f"t{index}", tensor)
                stored[f"t{index}"] = tensor
        assert stored and raised.value.path is not None
        assert raised.value.wanted_nbytes and raised.value.got_nbytes is not None
        assert (tensor == float(len(stored))).all()
        for key, expected in stored.items():
            assert torch.equal(swapper.swap_in(key), expected)
        swapper.discard("t0")
        swapper.swap_out("again", tensor)
        assert torch.equal(swapper.swap_in("again"), tensor)


