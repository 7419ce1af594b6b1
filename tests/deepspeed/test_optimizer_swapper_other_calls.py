"""What DeepSpeed does between steps: looking at states, changing them, loading, starting."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.errors import SwapReadError, SwapUsageError
from tests.deepspeed.sub_groups import ODD, PLENTY, Run, SwapConfig, bits

NUMELS = (ODD, 262_145)


def start(tmp_path: Path, buffer_count: int = 4, timers: Any = None, **config: bool) -> Run:
    return Run(SwapConfig(tmp_path, buffer_count, **config), numels=NUMELS, timers=timers)


@pytest.mark.parametrize("buffer_count", [4, PLENTY])
def test_looking_between_backward_and_step(tmp_path: Path, buffer_count: int) -> None:
    run = start(tmp_path, buffer_count, pipeline_read=True, pipeline_write=True)
    run.train(1)
    run.backward()
    for master, twin in zip(run.masters, run.twins, strict=True):
        run.swapper.swap_in_optimizer_state(master)
        assert master.grad is not None
        assert twin.grad is not None
        assert torch.equal(bits(master.grad), bits(twin.grad))
        run.swapper.release_swap_buffers(master)
        assert master.grad is None
    run.check()
    run.step()
    run.check()


@pytest.mark.parametrize("buffer_count", [4, PLENTY])
def test_changing_gradients_and_states(tmp_path: Path, buffer_count: int) -> None:
    run = start(tmp_path, buffer_count)
    run.train(1)
    run.backward()
    for master, twin in zip(run.masters, run.twins, strict=True):
        run.swapper.swap_in_optimizer_state(master)
        assert master.grad is not None
        assert twin.grad is not None
        master.grad.narrow(0, 3, 70_001).mul_(2)
        twin.grad.narrow(0, 3, 70_001).mul_(2)
        run.swapper.writeback_optimizer_state_and_gradients(master, False, True)
        assert master.numel() == 0
        run.swapper.swap_in_optimizer_state(master)
        state, twin_state = run.optimizer.state[master], run.twin_optimizer.state[twin]
        state["exp_avg"].narrow(0, 0, 5).fill_(0.5)
        twin_state["exp_avg"].narrow(0, 0, 5).fill_(0.5)
        run.swapper.writeback_optimizer_state_and_gradients(master, True, True)
    run.check()
    run.step()
    run.check()


def test_release_takes_changes_back(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(1)
    run.swapper.swap_in_optimizer_state(run.masters[0])
    run.masters[0].data.fill_(7)
    run.swapper.release_swap_buffers(run.masters[0])
    run.check()


def test_what_was_looked_at_stays_as_it_was_seen(tmp_path: Path) -> None:
    """On the CPU DeepSpeed gives its user views of the memory that it releases."""
    run = start(tmp_path, buffer_count=4)
    run.train(1)
    run.swapper.swap_in_optimizer_state(run.masters[0])
    view = run.masters[0].narrow(0, 5, 1000)
    seen = view.detach().clone()
    run.swapper.release_swap_buffers(run.masters[0])
    run.check()
    run.train(1)
    assert torch.equal(view, seen)


def test_purge_forgets_states(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(2)
    run.backward()
    run.swapper.purge_state()
    run.twin_optimizer.state.clear()
    run.train(2)
    run.check()


def test_purge_keeps_states_that_were_loaded(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.train(2)
    loaded = {}
    for master in run.masters:
        run.swapper.swap_in_optimizer_state(master)
        loaded[master] = {
            name: value.clone() for name, value in run.optimizer.state[master].items()
        }
        run.swapper.release_swap_buffers(master)
    run.optimizer.state.update(loaded)
    run.swapper.purge_state()
    run.check()
    run.train(1)
    run.check()


def test_optimizer_loads_its_own_state_dict(tmp_path: Path) -> None:
    """Which holds empty tensors while all is away."""
    run = start(tmp_path)
    run.train(1)
    run.optimizer.param_groups[0]["params"] = run.masters
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.optimizer.param_groups[0]["params"] = []
    run.train(1)
    run.check()


def test_start_from_files_of_partitions(tmp_path: Path) -> None:
    run = start(tmp_path / "a")
    whole = torch.randn(300_000).to(torch.bfloat16)
    path = tmp_path / "1_param.tensor.swp"
    path.write_bytes(whole[:100_001].view(torch.uint8).numpy().tobytes() + bytes(511))
    away = torch.tensor(0, dtype=torch.bfloat16)
    master = torch.empty(0)
    master.ds_id = "10_11"  # type: ignore[attr-defined]
    partitions = [(away, 100_001, str(path)), (whole[100_001:], 199_999, None)]
    run.swapper.initialize_from_swapped_fp16_params([partitions], [300_000], [], [master])
    run.swapper.swap_in_optimizer_state(master)
    assert torch.equal(master, whole.float())
    short = torch.empty(0)
    short.ds_id = "12_12"  # type: ignore[attr-defined]
    with pytest.raises(SwapReadError) as caught:
        run.swapper.initialize_from_swapped_fp16_params(
            [[(away, 110_000, str(path))]], [110_000], [], [short]
        )
    assert caught.value.path == path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_start_from_low_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    run = start(tmp_path)
    source = torch.randn(400_001).to(dtype)
    master = torch.empty(0)
    master.ds_id = "10_11"  # type: ignore[attr-defined]
    run.swapper.initialize_parameters([master], [source])
    run.swapper.swap_in_optimizer_state(master)
    assert torch.equal(master, source.float())


def test_all_but_scalars_is_swapped_whatever_the_blocks(tmp_path: Path) -> None:
    """What DeepSpeed keeps in memory (below 1 MiB, or aio.block_size if that is more) its
    checkpoints do not restore."""
    run = start(tmp_path)
    assert run.swapper.is_swappable_tensor(None, numel=1)
    assert not run.swapper.is_swappable_tensor(None, numel=0)
    assert not run.swapper.is_swappable_tensor(torch.tensor(1.0))
    tensor = torch.empty(1)
    assert run.swapper.is_swappable_tensor(tensor)
    tensor.swappable = False  # type: ignore[attr-defined]
    assert not run.swapper.is_swappable_tensor(tensor)
    with pytest.raises(SwapUsageError):
        run.swapper.is_swappable_tensor()


def test_gradients_of_a_step_that_is_not_taken_are_dropped(tmp_path: Path) -> None:
    """What the next step brings nothing for is zero, not an overflow of the last one."""
    run = start(tmp_path)
    run.backward()
    run.swapper.drop_gradients()
    for master in run.masters:
        run.swapper.swap_in_optimizer_state(master)
        assert master.grad is not None and not master.grad.any()
        run.swapper.release_swap_buffers(master)


def test_misuse_is_told(tmp_path: Path) -> None:
    run = start(tmp_path)
    master = run.masters[0]
    with pytest.raises(SwapUsageError, match="not in memory"):
        run.swapper.swap_out_optimizer_state(master)
    with pytest.raises(SwapUsageError, match="not in memory"):
        run.swapper.writeback_optimizer_state_and_gradients(master, True, True)
    with pytest.raises(SwapUsageError, match="already"):
        run.swapper.initialize_parameters([master], [torch.zeros(ODD)])
    with pytest.raises(SwapUsageError, match="outside"):
        run.swapper.swap_out_gradients(master, [ODD - 1], [torch.zeros(2)])
    run.train(1)
    run.check()


def test_unknown_parameters_are_left_alone(tmp_path: Path) -> None:
    run = start(tmp_path)
    small = torch.zeros(10)
    small.ds_id = "77_77"  # type: ignore[attr-defined]
    for parameter in (small, torch.zeros(3)):
        run.swapper.swap_in_optimizer_state(parameter)
        run.swapper.swap_out_optimizer_state(parameter)
        run.swapper.swap_out_gradients(parameter, [0], [torch.ones(3)])
        run.swapper.release_swap_buffers(parameter)
        run.swapper.writeback_optimizer_state_and_gradients(parameter, True, True)
        assert parameter.grad is None
        assert parameter.numel() in (3, 10)
    run.swapper.flush_gradients()
    assert run.swapper.parameter_id(small) == "77_77"


class Timers:
    """DeepSpeed's, as far as it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logged: list[list[str]] = []

    def __call__(self, name: str) -> Timers:
        self.name = name
        return self

    def start(self) -> None:
        self.calls.append(f"start {self.name}")

    def stop(self) -> None:
        self.calls.append(f"stop {self.name}")

    def log(self, names: list[str]) -> None:
        self.logged.append(list(names))


def test_timers_have_deepspeeds_names(tmp_path: Path) -> None:
    timers = Timers()
    run = start(tmp_path, timers=timers)
    run.train(1)
    run.swapper.log_timers()
    assert timers.logged == [["swap_in_state", "swap_out_gradient", "swap_out_state"]]
    starts = [call for call in timers.calls if call.startswith("start")]
    assert len(starts) * 2 == len(timers.calls) == 12


def test_a_dropped_swapper_leaves_nothing(tmp_path: Path) -> None:
    run = start(tmp_path, pipeline_write=True)
    run.train(1)
    assert list((tmp_path / "nvmeswap").glob("*/*"))
    del run
    gc.collect()
    assert list((tmp_path / "nvmeswap").glob("*/*")) == []
