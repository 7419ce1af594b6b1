"""Where DeepSpeed's ZeRO-3 trains on wrong bytes, or aborts, with our swappers in it it trains on
the right ones, or raises a typed error, and the run goes on once the cause is gone.

Each case runs in one process with all others (`small_runs`); "right" is bitwise DeepSpeed's own
CPU offload.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapIOError,
    SwapReadError,
    SwapSpaceError,
    SwapWriteError,
)
from tests.deepspeed.small_runs import (
    MIB,
    Layers,
    SmallRun,
    fail,
    files_of,
    full_disk,
    losses_in_ram,
    names_of_cases,
    on_nvme,
    outcomes_of_cases,
)

CASES = names_of_cases(__file__)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Of all cases."""
    return outcomes_of_cases(__name__, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", CASES)
def test_run_is_right_or_says_so(outcomes: dict[str, str | None], case: str) -> None:
    assert outcomes[case] is None, outcomes[case]


def raised_by(call: Callable[[], object], *kinds: type[SwapError]) -> SwapError:
    """Which says what was to be moved, where, and what can be done."""
    try:
        call()
    except SwapError as error:
        assert isinstance(error, kinds), repr(error)
        assert error.path is not None and error.fix, error
        if isinstance(error, SwapIOError):
            assert error.wanted_nbytes, error
        return error
    raise AssertionError("nothing was raised")


# --- no faults, but sizes that DeepSpeed gets wrong -----------------------------------------------


def case_partitions_of_odd_length(folder: Path) -> None:
    """No matrix fills its last sector, and biases begin at odd offsets of their sub-group."""
    for changes in ({}, {"aio__intra_op_parallelism": 16},
                    {"optimizer__pipeline_read": False, "optimizer__pipeline_write": False}):
        run = on_nvme(folder, **changes)
        assert run.train(4) == losses_in_ram(4), changes
    

class TwoOdd(nn.Module):
    """524_289 and 524_288 elements: the second gradient begins at an odd place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(524_289) / 8)
        self.second = nn.Parameter(torch.randn(524_288) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * (self.first[:524_288] * self.second).mean() + self.first[-1]


def case_gradients_at_odd_offsets(folder: Path) -> None:
    """DeepSpeed trains with what was in the second half of the buffer before."""
    for pipeline in (False, True):
        run = on_nvme(folder, TwoOdd, sub_group_size=2_000_000, param__buffer_size=600_000,
                      optimizer__pipeline_read=pipeline, optimizer__pipeline_write=pipeline)
        assert run.train(4) == losses_in_ram(4, TwoOdd)
    

class Product(nn.Linear):
    """Autograd keeps a view of its weight until backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


class Products(Layers):
    """All of the same size, so that the memory of one fits the next; some are used twice."""

    def __init__(self) -> None:
        super().__init__((512,) * 6, Product)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 1, 2, 3, 4, 5, 1, 3, 0, 2):
            x = torch.tanh(self.layers[number](x))
        return x


def case_views_that_autograd_keeps(folder: Path) -> None:
    """Memory that a view keeps for backward isn't lent again before it."""
    for buffer_count in (1, 2, 3):
        run = on_nvme(folder, Products, param__buffer_count=buffer_count,
                      param__buffer_size=262_144)
        assert run.train(3) == losses_in_ram(3, Products), buffer_count
        run.destroy()


def case_buffers_used_up(folder: Path) -> None:
    """DeepSpeed asserts, and then aborts the process, up to 10 optimizer buffers."""
    for buffer_count in (1, 2):
        run = on_nvme(folder, param__buffer_count=buffer_count,
                      optimizer__buffer_count=buffer_count)
        assert run.train(4) == losses_in_ram(4)
    

def case_blocks_of_8_mib(folder: Path) -> None:
    """In DeepSpeed all of this would stay in memory: the threshold grows with block_size."""
    run = on_nvme(folder, aio__block_size=8 * MIB)
    assert run.train(4) == losses_in_ram(4)
    swapped = [parameter for parameter in run.engine.module.parameters()
               if parameter.ds_tensor.final_location == "nvme"]
    assert len(swapped) == 4
    assert all(parameter.ds_tensor.data.dim() == 0 for parameter in swapped)
    assert all(master.numel() == 0 for master in run.engine.optimizer.fp32_partitioned_groups_flat
               if master.ds_id)


# --- a disk that is full --------------------------------------------------------------------------


def case_full_disk_while_the_model_is_built(folder: Path) -> None:
    with full_disk(folder, 3 * MIB):
        error = raised_by(lambda: on_nvme(folder), SwapSpaceError)
        assert error.got_nbytes is not None and error.got_nbytes < 4 * MIB
    gc.collect()
    run = on_nvme(folder)
    assert run.train(3) == losses_in_ram(3)


def case_full_disk_while_masters_are_made(folder: Path) -> None:
    with full_disk(folder, 6 * MIB):
        raised_by(lambda: on_nvme(folder), SwapSpaceError)
    gc.collect()
    run = on_nvme(folder)
    assert run.train(3) == losses_in_ram(3)


def case_full_disk_when_states_appear(folder: Path) -> None:
    """In the first step. What it has updated is in memory; a new run with space is exact."""
    run = on_nvme(folder)
    with full_disk(folder, MIB):
        raised_by(lambda: run.train(2), SwapSpaceError)
    run.destroy()
    run = on_nvme(folder)
    assert run.train(3) == losses_in_ram(3)


def case_full_disk_when_gradients_appear(folder: Path) -> None:
    """Of the second step, the first with states: they go to the drive where memory is short, and
    stay in memory where the drive is full too."""
    run = on_nvme(folder)
    run.train(1)
    with full_disk(folder, 0):
        run.train(1)
    assert run.train(2) == losses_in_ram(4)[2:]


# --- a drive that fails ---------------------------------------------------------------------------


def saved_run(folder: Path, **changes: int) -> SmallRun:
    """After two steps, with a checkpoint of them."""
    run = on_nvme(folder, **changes)
    run.train(2)
    run.engine.save_checkpoint(str(folder / "checkpoint"))
    return run


def resume(run: SmallRun, folder: Path, steps: int = 2) -> None:
    run.engine.load_checkpoint(str(folder / "checkpoint"))
    run.steps = steps


def case_failed_writes(folder: Path) -> None:
    """Of any block of a step and of the next forward: it is raised, and the run goes on from its
    checkpoint."""
    run = saved_run(folder)
    for number, code in ((1, errno.EIO), (2, errno.ENOSPC), (5, errno.EIO), (17, errno.ENOSPC)):
        fail(f"write {number} errno {code}")
        error = raised_by(lambda: run.train(2), SwapWriteError)
        assert error.errno == code
        fail("")
        resume(run, folder)
        assert run.train(2) == losses_in_ram(4)[2:], (number, code)
        resume(run, folder)


def case_failed_reads_in_forward(folder: Path) -> None:
    """The step before was whole, so the same forward can be called again."""
    run = on_nvme(folder, param__buffer_count=1)
    losses = run.train(2)
    for number in (1, 2, 3):
        fail(f"read {number} errno 5")
        error = raised_by(run.forward, SwapReadError)
        assert error.errno == errno.EIO and error.offset_bytes is not None
        fail("")
        losses.append(run.step())
    assert losses == losses_in_ram(5)


def case_failed_reads_in_a_step(folder: Path) -> None:
    run = saved_run(folder)
    for number in (1, 2, 3, 5, 8):
        loss = run.forward()
        run.engine.backward(loss)
        fail(f"read {number} errno 5")
        raised_by(run.engine.step, SwapReadError)
        fail("")
        resume(run, folder)
        assert run.train(2) == losses_in_ram(4)[2:], number
        resume(run, folder)


def case_transfers_that_are_cut_short_refused_and_late(folder: Path) -> None:
    """None of these is an error; DeepSpeed takes short ones for whole ones."""
    run = on_nvme(folder)
    fail("read 2 short 4096; write 3 short 8192; seed 7 rate 30 busy,late,delay")
    assert run.train(4) == losses_in_ram(4)


# --- files that change under way ------------------------------------------------------------------


DAMAGED_AT = 777_777


def damage(path: Path, how: str) -> None:
    if how == "truncate":
        os.truncate(path, DAMAGED_AT)
        return
    with path.open("r+b") as file:
        file.seek(DAMAGED_AT)
        (byte,) = file.read(1)
        file.seek(DAMAGED_AT)
        file.write(bytes([byte ^ 4]))


def case_damaged_files(folder: Path) -> None:
    """DeepSpeed trains on a flipped bit, and aborts at a short file. Gradients are written anew
    before they are read."""
    run = saved_run(folder, param__buffer_count=1, optimizer__buffer_count=1)
    names = ("params", "exp_avg", "exp_avg_sq", "gradient")
    by_name = {name: path for path in files_of(folder) for name in names if name in path.name}
    assert len(by_name) == 4
    for path in by_name.values():
        for how, kind in (("flip", SwapChecksumError), ("truncate", SwapReadError)):
            before = path.read_bytes()
            damage(path, how)
            if "gradient" not in path.name:
                assert raised_by(lambda: run.train(2), kind).path == path
                path.write_bytes(before)
                resume(run, folder)
            assert run.train(2) == losses_in_ram(4)[2:], (path, how)
            resume(run, folder)


# --- what others do -------------------------------------------------------------------------------


class Interrupted(Layers):
    """Raises in its third layer when it is told to."""

    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.raises and number == 2:
                raise ValueError("the user is told this")
            x = torch.tanh(layer(x))
        return x


def case_exception_of_the_users_in_an_evaluation(folder: Path) -> None:
    """With reads ahead under way.  field cases N01, H01"""
    run = on_nvme(folder, Interrupted)
    losses = run.train(2)
    run.engine.eval()
    run.engine.module.raises = True
    with torch.no_grad():
        try:
            run.forward()
        except ValueError as error:
            assert str(error) == "the user is told this"
    run.engine.module.raises = False
    run.engine.train()
    assert losses + run.train(2) == losses_in_ram(4, Interrupted)


def case_exception_of_the_users_in_training(folder: Path) -> None:
    run = on_nvme(folder, Interrupted)
    losses = run.train(2)
    run.engine.module.raises = True
    try:
        run.forward()
    except ValueError as error:
        assert str(error) == "the user is told this"
    run.engine.module.raises = False
    assert losses + run.train(2) == losses_in_ram(4, Interrupted)


def case_two_jobs_in_one_folder(folder: Path) -> None:
    """In DeepSpeed the second one removes the files of the first."""
    first = on_nvme(folder)
    losses = first.train(2)
    second = on_nvme(folder)
    assert second.train(2) == losses_in_ram(2)
    losses += first.train(1)
    second.destroy()
    assert losses + first.train(1) == losses_in_ram(4)


def case_nothing_is_left(folder: Path) -> None:
    """In DeepSpeed all files stay, and the optimizer's grow in number.  field case F02"""
    run = on_nvme(folder)
    run.train(1)
    assert files_of(folder)
    run.destroy()
    del run
    gc.collect()
    assert files_of(folder) == []
