"""Each transfer of two steps fails once, in each way: the error is typed, trying again is exact."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.config import SwapBlock
from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.conftest import Bench
from tests.swap.twins import ADAMW, BF16, FP32, Twins, parameters_of

NOTHING = "read 1000000 errno 5"
# In sub-groups of 4096 elements there are five of them, with masters of all forms.
SHAPES = [(37,), (5000,), (9000,), (3000,)]
DTYPES = [FP32, BF16, torch.float16, FP32]
MOST_TRANSFERS = 12


def twins_over(bench: Bench, *, slot_count: int | None = None, overlap: bool = False) -> Twins:
    def make(groups: Any) -> SwappedOptimizer:
        optimizer = bench.optimizer(
            ADAMW.kind, groups, buffer_count=2, slot_count=slot_count, **ADAMW.options
        )
        if overlap:
            optimizer.overlap_backward(OverlapSettings())
        return optimizer

    return Twins(ADAMW, parameters_of(SHAPES, DTYPES), make)


def backward_through_autograd(twins: Twins, seed: int) -> None:
    """Gradients that depend on the seed alone, and on their way the overlapped update."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for parameter, master in zip(twins.params, twins.masters, strict=True):
        weights = torch.randn(parameter.shape, generator=generator)
        master.grad = weights.to(parameter.dtype).to(FP32)
        total = total + (parameter.to(FP32) * weights).sum()
    total.backward()


def one_step(twins: Twins, seed: int, *, overlap: bool) -> None:
    if overlap:
        backward_through_autograd(twins, seed)
        twins.plain.step()
    else:
        twins.backward(seed)
        twins.step_plain()


def step_until_it_succeeds(
    twins: Twins, bench: Bench, kind: type[SwapError], number: int | None
) -> int:
    """How often it failed."""
    for failure_count in range(4):
        try:
            twins.swapped.step()
        except SwapError as error:
            assert isinstance(error, kind) and error.errno == number
            assert twins.swapped.step_is_unfinished
            for refused in (twins.swapped.zero_grad, twins.swapped.state_dict):
                with pytest.raises(SwapUsageError):
                    refused()
            if kind is SwapTimeoutError:
                bench.engine.inject(NOTHING)  # the drive is back
        else:
            return failure_count
    raise AssertionError("the step never succeeded")


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("slot_count", [2, 4], ids=["swapped", "some in memory"])
@pytest.mark.parametrize(
    ("direction", "action", "kind", "number"),
    [
        ("read", "errno 5", SwapReadError, errno.EIO),
        ("read", "short 0", SwapReadError, None),
        ("read", "flip", SwapChecksumError, None),
        ("read", "never", SwapTimeoutError, None),
        ("write", "errno 5", SwapWriteError, errno.EIO),
        ("write", "errno 28", SwapSpaceError, errno.ENOSPC),
        ("write", "short 0", SwapWriteError, None),
        ("write", "never", SwapTimeoutError, None),
    ],
)
def test_step_in_which_any_transfer_failed_can_be_taken_again(
    tmp_path: Path,
    direction: str,
    action: str,
    kind: type[SwapError],
    number: int | None,
    slot_count: int,
    overlap: bool,
) -> None:
    """Else an update is lost, or made twice, and nobody knows."""
    never = action == "never"
    failure_counts = []
    stride = 3 if overlap or slot_count > 2 else 1  # for the time it takes
    for n in (1, 4) if never else range(1, MOST_TRANSFERS, stride):
        folder = tmp_path / str(n)
        folder.mkdir()
        bench = Bench(folder, timeout_s=0.2 if never else 20)
        twins = twins_over(bench, slot_count=slot_count, overlap=overlap)
        one_step(twins, 0, overlap=overlap)
        twins.swapped.step()
        twins.swapped.zero_grad()
        bench.engine.inject(f"{direction} {n} {action}")
        failure_counts.append(0)
        for step in (1, 2):
            one_step(twins, step, overlap=overlap)
            failure_counts[-1] += step_until_it_succeeds(twins, bench, kind, number)
            twins.swapped.zero_grad()
        bench.engine.inject(NOTHING)
        twins.assert_same()
        assert twins.swapped.stats().step_count == 3
        bench.close()
    assert 1 in failure_counts[:2] and max(failure_counts) == 1


# --- what the drive has lost ----------------------------------------------------------------------


def saved_after(twins: Twins, steps: range) -> tuple[dict[str, Any], list[torch.Tensor]]:
    for step in steps:
        twins.backward(step)
        twins.step()
        twins.swapped.zero_grad()
    weights = [parameter.detach().clone() for parameter in twins.params]
    return copy.deepcopy(twins.swapped.state_dict()), weights


def restore(twins: Twins, saved: dict[str, Any], weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, weight in zip(twins.params, weights, strict=True):
            parameter.copy_(weight)
    twins.swapped.load_state_dict(copy.deepcopy(saved))


def damage(bench: Bench) -> None:
    with bench.store.path("sub_group.0").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))


@pytest.mark.parametrize("slot_count", [2, 4], ids=["swapped", "some in memory"])
def test_state_that_the_drive_lost_is_restored_from_the_last_state_dict(
    bench: Bench, slot_count: int
) -> None:
    """Else a damaged file ends the run, or it goes on with half of it."""
    twins = twins_over(bench, slot_count=slot_count)
    saved, weights = saved_after(twins, range(2))
    twins.backward(2)
    damage(bench)
    for _ in range(2):
        with pytest.raises(SwapChecksumError):
            twins.swapped.step()
    with pytest.raises(SwapUsageError):
        twins.swapped.state_dict()
    restore(twins, saved, weights)
    assert not twins.swapped.step_is_unfinished
    twins.swapped.zero_grad()
    twins.assert_same()
    saved_after(twins, range(2, 4))
    twins.assert_same()


@pytest.mark.parametrize("n", range(1, 5))
def test_load_that_failed_is_refused_until_it_is_repeated(bench: Bench, n: int) -> None:
    """A state of two runs must not be stepped in silence."""
    twins = twins_over(bench)
    saved, weights = saved_after(twins, range(2))
    later = [parameter.detach().clone() for parameter in twins.params]
    assert all(map(torch.equal, later, weights))
    for step in (7, 8):  # of a run that is given up
        twins.backward(step)
        twins.swapped.step()
        twins.swapped.zero_grad()
    bench.engine.inject(f"write {n} errno 5")
    with pytest.raises(SwapWriteError):
        restore(twins, saved, weights)
    twins.backward(2)
    refused: list[Callable[[], Any]] = [
        twins.swapped.step, twins.swapped.state_dict,
        lambda: twins.swapped.read_state(twins.params[0], "exp_avg"),
    ]
    for each in refused:
        with pytest.raises(SwapUsageError, match="in part"):
            each()
    twins.swapped.zero_grad()
    restore(twins, saved, weights)
    saved_after(twins, range(2, 4))
    twins.assert_same()


def test_write_of_one_state_that_failed_can_be_repeated(bench: Bench) -> None:
    """All else is refused until then: half of the tensor is new."""
    twins = twins_over(bench)
    saved_after(twins, range(2))
    large = twins.params[2]
    bench.engine.inject("read * errno 5")
    with pytest.raises(SwapReadError):
        for _ in range(3):  # some of it may be in memory
            twins.swapped.write_state(large, torch.ones(9000), "exp_avg")
            twins.swapped.read_state(twins.params[0], "exp_avg")
    bench.engine.inject(NOTHING)
    twins.swapped.write_state(large, torch.ones(9000), "exp_avg")
    twins.plain.state[twins.masters[2]]["exp_avg"].fill_(1)
    saved_after(twins, range(2, 4))
    twins.assert_same()


def test_save_that_failed_leaves_no_file_and_nothing_changed(bench: Bench) -> None:
    """The last good checkpoint must not be replaced by half of one."""
    twins = twins_over(bench)
    saved_after(twins, range(2))
    path = bench.nvme_path / "state.safetensors"
    for n in range(1, 4):
        bench.engine.inject(f"read {n} errno 5")
        with pytest.raises(SwapReadError):
            twins.swapped.save(path)
        assert not list(bench.nvme_path.glob("state*"))
    twins.swapped.save(path)
    saved_after(twins, range(2, 4))
    twins.assert_same()


def test_group_for_which_there_is_no_space_leaves_everything_as_it_was(
    mount_tmpfs: Callable[[str], Path]
) -> None:
    """Else an optimizer with half a group, or a run that must be started anew."""
    twins = Twins(
        ADAMW,
        parameters_of(SHAPES, DTYPES),
        lambda groups: SwappedOptimizer(
            ADAMW.kind, groups, nvme_path=mount_tmpfs("tmpfs -o size=6m"), pin_memory=False,
            sub_group_size=4096, **ADAMW.options,
        ),
    )
    saved_after(twins, range(2))
    too_large = torch.nn.Parameter(torch.zeros(1_000_000))
    for _ in range(2):
        with pytest.raises(SwapSpaceError):
            twins.swapped.add_param_group({"params": [too_large]})
        assert len(twins.swapped.param_groups) == 2
    twins.add_group(parameters_of([(9000,)], [BF16], seed=1))
    saved_after(twins, range(2, 4))
    twins.assert_same()
    twins.swapped.close()


def test_group_added_when_all_slots_are_taken_for_good(tmp_path: Path) -> None:
    """It used to wait for a slot that nobody gives back; what was in memory is swapped now."""
    twins = Twins(
        ADAMW,
        parameters_of(SHAPES, DTYPES),
        lambda groups: SwappedOptimizer(
            ADAMW.kind, groups, nvme_path=tmp_path, pin_memory=False, sub_group_size=4096,
            ratio=0, swap=SwapBlock(timeout_s=5), **ADAMW.options,
        ),
    )
    saved_after(twins, range(2))
    stats = twins.swapped.stats()
    assert stats.in_ram_count == stats.sub_group_count and stats.write_nbytes == 0
    twins.add_group(parameters_of([(9000,)], [torch.float16], seed=1))
    saved_after(twins, range(2, 5))
    twins.assert_same()
    assert twins.swapped.stats().write_nbytes > 0
    twins.swapped.close()


def test_state_lost_while_backward_is_overlapped_is_restored_too(bench: Bench) -> None:
    """Backward itself goes on; step() tells."""
    twins = twins_over(bench, overlap=True)
    saved, weights = saved_after(twins, range(2))
    damage(bench)
    backward_through_autograd(twins, 2)
    for _ in range(2):
        with pytest.raises(SwapChecksumError):
            twins.swapped.step()
    restore(twins, saved, weights)
    twins.swapped.zero_grad()
    for step in (2, 3):
        one_step(twins, step, overlap=True)
        twins.swapped.step()
        twins.swapped.zero_grad()
    twins.assert_same()
