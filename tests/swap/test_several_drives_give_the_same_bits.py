"""Swappers over several folders: equal to one folder, and a lost drive is told by its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap import SwappedAdamW, TensorSwapper
from nvmeswap.config import SameDriveWarning
from nvmeswap.errors import SwapIOError, SwapPathError
from nvmeswap.io.drives import SlowDriveWarning
from tests.swap.conftest import set_gradients

MakeParameters = Callable[..., list[torch.nn.Parameter]]
SIZES = [1_100_003, 700_001, 513]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[Path]]:
    made = [tmp_path / "first", tmp_path / "second"]
    for folder in made:
        folder.mkdir()
    with warnings.catch_warnings():
        # Both are on one drive, and others load it while it is measured.
        warnings.simplefilter("ignore", SameDriveWarning)
        warnings.simplefilter("ignore", SlowDriveWarning)
        yield made


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.swp"))


def test_tensors_over_two_folders_come_back(folders: list[Path]) -> None:
    """Else more drives mean other bytes."""
    with TensorSwapper([str(folders[0]), folders[1]]) as swapper:
        tensors = {
            "large": torch.randn(2_500_001), "small": torch.randn(3).to(torch.bfloat16),
            "matrix": torch.randn(700, 1000).t(), "empty": torch.empty(0),
        }
        for key, tensor in tensors.items():
            swapper.swap_out(key, tensor)
        assert all(used(folder) > 0 for folder in folders)
        for key, tensor in tensors.items():
            back = swapper.swap_in(key)
            assert back.stride() == tensor.stride() and torch.equal(back, tensor)
    assert all(used(folder) == 0 for folder in folders)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_over_two_folders_equals_one(
    tmp_path: Path, folders: list[Path], parameters: MakeParameters, dtype: torch.dtype
) -> None:
    """Else more drives mean other weights."""
    alone = tmp_path / "alone"
    alone.mkdir()
    runs = []
    for places in (alone, folders):
        params = parameters(SIZES, dtype=dtype)
        optimizer = SwappedAdamW(params, lr=1e-2, nvme_path=places, sub_group_size=400_000)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        if places is folders:
            assert all(used(folder) > 0 for folder in folders)
        runs.append((params, optimizer.state_dict()["state"]))
        optimizer.close()
    (one, one_state), (two, two_state) = runs
    assert all(map(torch.equal, one, two))
    for index, states in one_state.items():
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(two_state[index][name]), torch.as_tensor(value))


def open_optimizer(params: Any, places: list[Path]) -> SwappedAdamW:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowDriveWarning)
        return SwappedAdamW(params, nvme_path=places, sub_group_size=400_000, buffer_count=1)


def test_step_after_a_drive_was_lost_names_it_and_ends(
    tmp_path: Path, parameters: MakeParameters, drive_to_lose: tuple[Path, Callable[[], None]]
) -> None:
    """Else a run over several drives hangs on the dead one, or blames another."""
    lost, lose = drive_to_lose
    good = tmp_path / "good"
    good.mkdir()
    params = parameters(SIZES)
    optimizer = open_optimizer(params, [good, lost])
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    lose()
    set_gradients(params, 2)
    for _ in range(2):  # it may be tried again, and says the same
        with pytest.raises(SwapIOError) as raised:
            optimizer.step()
        error = raised.value
        assert error.path is not None and error.path.is_relative_to(lost)
        assert error.intact is not None and str(good) in error.intact
    optimizer.close()
    assert used(good) == 0


def test_missing_drive_is_named_before_anything_is_written(
    folders: list[Path], parameters: MakeParameters
) -> None:
    """Else a drive that is not mounted is noticed by its neighbour's error."""
    missing = folders[0] / "unmounted"
    with pytest.raises(SwapPathError) as raised:
        SwappedAdamW(parameters([10]), nvme_path=[folders[0], missing])
    assert raised.value.path == missing
    assert list(folders[0].iterdir()) == []
