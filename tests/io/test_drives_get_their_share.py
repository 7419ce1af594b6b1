"""Which share of the stripes each of several drives gets."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.errors import SwapIOError, SwapPathError
from nvmeswap.io import probe_folders
from nvmeswap.io.drives import SlowDriveWarning, weights_of

speeds_of_drives = st.lists(st.floats(1e8, 1.4e10), min_size=1, max_size=16)


@given(speeds=speeds_of_drives)
def test_row_is_as_fast_as_the_drives_together_within_its_length(speeds: list[float]) -> None:
    """Else a fast drive waits for a slow one in every row."""
    weights = weights_of(speeds)
    assert len(weights) == len(speeds) and min(weights) >= 1 and sum(weights) <= 64
    slowest = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    speed = sum(weights) / slowest
    # A row of 64 can miss by less than a stripe a drive.
    assert speed >= sum(speeds) * min(0.95, 1 - len(speeds) / 64) or min(weights) == 1


@pytest.mark.parametrize(
    ("speeds", "weights"),
    [([3e9], (1,)), ([3e9, 3.1e9], (1, 1)), ([1e9, 2e9], (1, 2)), ([6e9, 4e9, 2e9], (3, 2, 1)),
     ([1e9] * 16, (1,) * 16), ([7e9, 1e8], (63, 1))],
)
def test_weights_are_the_smallest_in_proportion(
    speeds: list[float], weights: tuple[int, ...]
) -> None:
    """Else drives that are alike get unequal shares because a measure wavers."""
    assert weights_of(speeds) == weights


def test_single_folder_is_not_measured(tmp_path: Path) -> None:
    """Else every start with one drive pays for nothing."""
    (drive,) = probe_folders([tmp_path]).drives
    assert (drive.folder, drive.weight) == (tmp_path, 1)
    assert drive.read_nbytes_per_s is drive.write_nbytes_per_s is None


def test_several_folders_are_measured_and_left_clean(tmp_path: Path) -> None:
    """Else shares are guessed, files of 64 MiB stay behind, or a seeded run draws other numbers."""
    random_state = torch.get_rng_state()
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowDriveWarning)
        probe = probe_folders(folders)
    assert probe.folder == folders[0]
    assert [drive.folder for drive in probe.drives] == folders
    for drive in probe.drives:
        assert drive.read_nbytes_per_s and drive.write_nbytes_per_s and drive.weight >= 1
    assert not any(list(folder.iterdir()) for folder in folders)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_backend_that_does_not_suit_one_folder_is_used_for_none(tmp_path: Path) -> None:
    """Else transfers to one drive run within the submission of the others'."""
    with (
        tempfile.TemporaryDirectory(prefix="nvmeswap-test-", dir="/dev/shm") as memory,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        probe = probe_folders([tmp_path, Path(memory)])
    assert probe.backend == "posix"
    assert len(probe.drives) == 2


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    """Else nobody knows which drive is not mounted."""
    with pytest.raises(SwapPathError) as raised:
        probe_folders([tmp_path, tmp_path / "unmounted"])
    assert raised.value.path == tmp_path / "unmounted"


def test_folder_that_is_full_is_named(tmp_path: Path, small_tmpfs: Path) -> None:
    """Else the wrong drive is cleared.  field case K01"""
    with pytest.raises((SwapPathError, SwapIOError)) as raised:
        probe_folders([tmp_path, small_tmpfs])
    assert raised.value.path is not None and raised.value.path.is_relative_to(small_tmpfs)
    assert list(small_tmpfs.iterdir()) == []
