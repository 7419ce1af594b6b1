"""A full disk, a failed transfer, a wrong byte: an error that says so, and whole states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.deepspeed.files import engines
from nvmeswap.errors import SwapChecksumError, SwapIOError, SwapSpaceError, SwapWriteError
from nvmeswap.io import Engine, probe_folder
from tests.deepspeed.sub_groups import ODD, Run, SwapConfig, bits

NUMELS = (ODD, 262_145)
NO_FAULT = "read 1000000 errno 5"


def test_full_disk_leaves_the_step_usable(mount_tmpfs: Callable[[str], Path]) -> None:
    folder = mount_tmpfs("tmpfs -o size=8m")
    filler = folder / "filler"
    filler.write_bytes(bytes(4 << 20))  # 3.1 MB of masters fit, 6.3 MB of states do not
    run = Run(SwapConfig(folder, 4), numels=NUMELS)
    filler.write_bytes(bytes(4 << 20))
    run.backward()
    master, twin = run.masters[0], run.twins[0]
    run.swapper.swap_in_optimizer_state(master)
    run.optimizer.param_groups[0]["params"] = [master]
    run.optimizer.step()
    run.optimizer.param_groups[0]["params"] = []
    run.twin_optimizer.param_groups[0]["params"] = [twin]
    run.twin_optimizer.step()
    for _ in range(2):
        with pytest.raises(SwapSpaceError):
            run.swapper.swap_out_optimizer_state(master)
        assert torch.equal(bits(master), bits(twin))
        state = run.optimizer.state[master]["exp_avg"]
        assert torch.equal(bits(state), bits(run.twin_optimizer.state[twin]["exp_avg"]))
    filler.unlink()
    run.swapper.swap_out_optimizer_state(master)
    assert master.numel() == 0
    run.check_group(0)


def test_disk_too_small_for_masters(mount_tmpfs: Callable[[str], Path]) -> None:
    with pytest.raises(SwapSpaceError) as caught:
        Run(SwapConfig(mount_tmpfs("tmpfs -o size=2m")), numels=NUMELS)
    assert caught.value.path is not None
    assert caught.value.path.name == "0_1.tensor.swp"


def test_gradients_for_which_there_is_no_disk_stay_in_memory(
    mount_tmpfs: Callable[[str], Path],
) -> None:
    run = Run(SwapConfig(mount_tmpfs("tmpfs -o size=4m"), buffer_count=1), numels=NUMELS)
    with pytest.warns(ResourceWarning, match="offload_optimizer.buffer_count"):
        run.backward()
    for master, twin in zip(run.masters, run.twins, strict=True):
        run.swapper.swap_in_optimizer_state(master)
        assert master.grad is not None and twin.grad is not None
        assert torch.equal(bits(master.grad), bits(twin.grad))
        run.swapper.release_swap_buffers(master)


@pytest.mark.parametrize("name", ["0_1.tensor.swp", "exp_avg_sq-0_1.tensor.swp"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_wrong_byte_is_told(tmp_path: Path, name: str, is_ahead: bool) -> None:
    run = Run(SwapConfig(tmp_path, 12, pipeline_read=True), numels=(262_145, ODD))
    run.masters.reverse()  # the sub-group read ahead is 0_1
    run.twins.reverse()
    run.train(1)
    (folder,) = (tmp_path / "nvmeswap").glob("*/rank00000")
    fd = os.open(folder / name, os.O_RDWR)
    byte = os.pread(fd, 1, 1_000_000)[0]
    os.pwrite(fd, bytes([byte ^ 1]), 1_000_000)
    os.fsync(fd)
    os.close(fd)
    if is_ahead:
        run.swapper.swap_in_optimizer_state(run.masters[0], run.masters[1])
    for _ in range(2):
        with pytest.raises(SwapChecksumError) as caught:
            run.swapper.swap_in_optimizer_state(run.masters[1])
        assert caught.value.path is not None
        assert caught.value.path.name == name
        assert run.masters[1].numel() == 0
    if is_ahead:
        run.swapper.release_swap_buffers(run.masters[0])
    run.check_group(0)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The swapper's, which meets the faults of `inject`."""
    made = Engine(backend=probe_folder(tmp_path).backend, fault_script=NO_FAULT)
    monkeypatch.setattr(engines, "get", lambda backend, size: made)
    yield made
    made.inject(NO_FAULT)
    made.close()


@pytest.mark.parametrize("writes_behind", [False, True])
def test_failed_write_leaves_its_sub_group_in_memory(
    tmp_path: Path, engine: Engine, writes_behind: bool
) -> None:
    run = Run(SwapConfig(tmp_path, 4, pipeline_write=writes_behind), numels=NUMELS)
    run.train(1)
    run.backward()
    master, twin = run.masters[0], run.twins[0]
    run.swapper.swap_in_optimizer_state(master)
    run.optimizer.param_groups[0]["params"] = [master]
    run.optimizer.step()
    run.twin_optimizer.step()
    engine.inject("write 2 errno 5")
    with pytest.raises(SwapWriteError) as caught:
        run.swapper.swap_out_optimizer_state(master, async_swap=True)
        run.swapper.swap_in_optimizer_state(run.masters[1])
    assert caught.value.intact is not None
    assert torch.equal(bits(master), bits(twin))
    state = run.optimizer.state[master]["exp_avg"]
    assert torch.equal(bits(state), bits(run.twin_optimizer.state[twin]["exp_avg"]))
    run.swapper.swap_out_optimizer_state(master)
    run.check_group(0)
    run.swapper.close()


@pytest.mark.parametrize("buffer_count", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_any_transfer_may_fail(
    tmp_path: Path, engine: Engine, seed: int, buffer_count: int
) -> None:
    """Whoever calls again gets what there would have been without the fault."""
    config = SwapConfig(tmp_path, buffer_count, pipeline_read=True, pipeline_write=True)
    run = Run(config, numels=[*NUMELS, 262_144])
    run.train(1)
    failed_count = 0
    for _ in range(2):
        run.backward()
        engine.inject(f"seed {seed} rate 10 errno")
        for number, master in enumerate(run.masters):
            later = run.masters[number + 1] if number + 1 < len(run.masters) else None
            failed_count += _insist(run, [run.swapper.swap_in_optimizer_state, master, later])
            run.optimizer.param_groups[0]["params"] = [master]
            run.optimizer.step()
            run.optimizer.param_groups[0]["params"] = []
            failed_count += _insist(run, [run.swapper.swap_out_optimizer_state, master, True])
        engine.inject(NO_FAULT)
        _insist(run, [run.swapper.swap_in_optimizer_state, run.masters[0], None])
        run.swapper.release_swap_buffers(run.masters[0])
        run.twin_optimizer.step()
    run.check()
    assert failed_count > 0
    run.swapper.close()


def _insist(run: Run, call: list[Any]) -> int:
    """Calls until it succeeds; how often it failed. A sub-group left in memory goes out again."""
    function, master, *others = call
    for failed_count in range(1000):
        try:
            for other in run.masters:
                if other is not master and other.numel():
                    run.swapper.swap_out_optimizer_state(other)
            if function == run.swapper.swap_in_optimizer_state or master.numel():
                function(master, *others)
        except SwapIOError:
            continue
        return failed_count
    raise AssertionError("it fails for ever")
