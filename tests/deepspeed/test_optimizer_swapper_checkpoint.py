"""The swap folder, copied as DeepSpeed copies it, is a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapChecksumError, SwapManifestError
from tests.deepspeed.sub_groups import ODD, PLENTY, Run, SwapConfig

SIDECAR = "nvmeswap_optimizer.json"
NUMELS = (ODD, 262_145)


def save(run: Run, folder: Path) -> Path:
    """As DeepSpeed's engine."""
    shutil.copytree(
        run.swapper.swap_folder, folder,
        ignore=lambda _, names: [name for name in names if "gradient" in name],
    )
    return folder


def load(run: Run, folder: Path) -> None:
    """As DeepSpeed's engine, with the first half of its reset_swap_buffers."""
    shutil.copytree(folder, run.swapper.swap_folder, dirs_exist_ok=True)
    run.swapper.swap_in_optimizer_state(run.masters[0], run.masters[1])
    run.swapper.swap_out_optimizer_state(run.masters[0])


def continue_as(run: Run, other: Run) -> None:
    """`run` has what `other` had in RAM."""
    run.twins, run.twin_optimizer, run.draw = other.twins, other.twin_optimizer, other.draw


def start(tmp_path: Path, buffer_count: int = 4, **config: bool) -> Run:
    return Run(SwapConfig(tmp_path, buffer_count, **config), numels=NUMELS)


@pytest.mark.parametrize("counts", [(4, 4), (PLENTY, 4), (1, PLENTY)])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_fresh_process_goes_on(tmp_path: Path, counts: tuple[int, int]) -> None:
    """Moments and step included, which DeepSpeed itself loses."""
    first = start(tmp_path, counts[0], pipeline_write=True)
    first.train(3)
    saved = save(first, tmp_path / "saved")
    first.check()  # it is as it was
    first.swapper.close()
    second = start(tmp_path, counts[1], pipeline_read=True)
    continue_as(second, first)
    load(second, saved)
    second.check()
    second.train(2)
    second.check()
    saved_again = save(second, tmp_path / "again")
    third = start(tmp_path)
    continue_as(third, second)
    load(third, saved_again)
    third.train(1)
    third.check()


def test_second_model_of_a_process_goes_on(tmp_path: Path) -> None:
    """DeepSpeed counts its parameters on, so it has other names."""
    first = start(tmp_path)
    first.train(2)
    saved = save(first, tmp_path / "saved")
    second = Run(SwapConfig(tmp_path, 4), numels=NUMELS, first_id=10)
    continue_as(second, first)
    load(second, saved)
    second.check()
    second.train(1)
    second.check()
    names = {path.name for path in Path(second.swapper.swap_folder).glob("*.swp")}
    assert not [name for name in names if "0_1." in name]
    overlapping = Run(SwapConfig(tmp_path, 4), numels=NUMELS, first_id=2)
    with pytest.raises(SwapManifestError, match="sub_groups"):
        load(overlapping, saved)


def test_same_process_goes_back(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(2)
    saved = save(run, tmp_path / "saved")
    wanted = [twin.detach().clone() for twin in run.twins]
    run.train(2)
    load(run, saved)
    for master, twin in zip(run.masters, wanted, strict=True):
        run.swapper.swap_in_optimizer_state(master)
        assert torch.equal(master, twin)
        assert float(run.optimizer.state[master]["step"]) == 2
        run.swapper.release_swap_buffers(master)


def test_going_back_to_before_the_first_step(tmp_path: Path) -> None:
    run = start(tmp_path)
    saved = save(run, tmp_path / "saved")
    fresh = start(tmp_path)
    run.train(2)
    load(run, saved)
    continue_as(run, fresh)
    run.train(2)
    run.check()


def test_copying_nothing_in_changes_nothing(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(1)
    folder = Path(run.swapper.swap_folder)
    assert (folder / SIDECAR).stat().st_mode & 0o077 == 0
    read_nbytes = run.swapper.stats().read_nbytes
    run.swapper.init_timers()
    run.swapper.release_swap_buffers(run.masters[0])
    assert run.swapper.stats().read_nbytes == read_nbytes
    run.train(1)
    run.check()


def test_folder_goes_with_its_swapper(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(1)
    saved = save(run, tmp_path / "saved")
    second = start(tmp_path)
    load(second, saved)
    folders = [Path(each.swapper.swap_folder) for each in (run, second)]
    owners = [json.loads((folder / "owner.json").read_text())["run"] for folder in folders]
    assert owners == [folder.parent.name for folder in folders]
    run.swapper.close()
    second.swapper.close()
    assert list((tmp_path / "nvmeswap").glob("*/*")) == []


def test_damaged_copy_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(1)
    saved = save(run, tmp_path / "saved")
    with open(saved / "exp_avg-2_3.tensor.swp", "r+b") as file:
        file.seek(262_145 * 4 - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    second = start(tmp_path)
    for _ in range(2):  # it stays refused
        with pytest.raises(SwapChecksumError) as caught:
            load(second, saved)
        assert caught.value.path is not None
        assert caught.value.path.name == "exp_avg-2_3.tensor.swp"


def test_cut_copy_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(1)
    saved = save(run, tmp_path / "saved")
    os.truncate(saved / "2_3.tensor.swp", 4096)
    with pytest.raises(SwapManifestError) as caught:
        load(start(tmp_path), saved)
    assert caught.value.field == "nbytes"
    (saved / SIDECAR).write_text("{")
    with pytest.raises(SwapManifestError) as caught:
        load(start(tmp_path), saved)
    assert caught.value.field == "format"


def test_other_model_is_refused(tmp_path: Path) -> None:
    saved = save(start(tmp_path), tmp_path / "saved")
    with pytest.raises(SwapManifestError, match="sub_groups"):
        load(Run(SwapConfig(tmp_path), numels=[*NUMELS, ODD]), saved)
    with pytest.raises(SwapManifestError, match="numel"):
        load(Run(SwapConfig(tmp_path), numels=[ODD, 262_144]), saved)


def test_checkpoint_of_deepspeed_itself(tmp_path: Path) -> None:
    """Files alone, padded otherwise: masters count, and states where the optimizer has some."""
    first = start(tmp_path)
    first.train(2)
    saved = save(first, tmp_path / "saved")
    for name in (SIDECAR, "owner.json", "manifest.json"):
        (saved / name).unlink()
    for file in saved.glob("*.swp"):
        os.truncate(file, -(-file.stat().st_size // 16384) * 16384)
    second = start(tmp_path)
    with pytest.warns(UserWarning, match="start from zero"):
        load(second, saved)
    for master, twin in zip(second.masters, first.twins, strict=True):
        second.swapper.swap_in_optimizer_state(master)
        assert torch.equal(master, twin)
        assert not second.optimizer.state.get(master)
        second.swapper.release_swap_buffers(master)
    second.train(1)  # its own states are new files

    third = start(tmp_path)
    third.train(2)
    continue_as(third, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(third, saved)
    third.check()
    third.train(1)
    third.check()


def test_deepspeeds_checkpoint_needs_all_masters(tmp_path: Path) -> None:
    saved = save(start(tmp_path), tmp_path / "saved")
    (saved / SIDECAR).unlink()
    (saved / "2_3.tensor.swp").unlink()
    with pytest.raises(SwapManifestError, match="sub_groups"):
        load(start(tmp_path), saved)


def test_state_kept_in_memory_is_named(tmp_path: Path) -> None:
    run = start(tmp_path)
    momentum = torch.zeros(ODD)
    momentum.swappable = False  # type: ignore[attr-defined]
    run.optimizer.state[run.masters[0]]["momentum_buffer"] = momentum
    with pytest.warns(UserWarning, match="momentum_buffer"):
        save(run, tmp_path / "saved")
