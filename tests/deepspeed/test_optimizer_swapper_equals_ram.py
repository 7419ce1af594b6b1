"""Bit for bit the same optimizer in RAM, whatever the budget and the pipeline."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.deepspeed.sub_groups import NUMELS, ODD, PLENTY, Run, SwapConfig, bits

PIPELINES = [(False, False), (True, False), (False, True), (True, True)]
STATES_AND_GRADIENT = 4  # buffers of one sub-group under Adam


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("buffer_count", [1, 5, PLENTY])
def test_training(tmp_path: Path, buffer_count: int, pipeline: tuple[bool, bool]) -> None:
    # field case: buffer counts at which DeepSpeed's pipelined swapper stops
    run = Run(SwapConfig(tmp_path, buffer_count, *pipeline))
    with warnings.catch_warnings():
        if buffer_count >= STATES_AND_GRADIENT:
            warnings.simplefilter("error", ResourceWarning)
        else:
            warnings.simplefilter("ignore", ResourceWarning)
        run.train(2)
        run.check()
        run.train(3, pieces=5, gap=7)
        run.check()
    if buffer_count >= STATES_AND_GRADIENT:
        assert run.swapper.buffers.lent_nbytes <= run.swapper.buffers.budget_nbytes
    run.swapper.close()


def test_gradient_pieces_at_odd_offsets(tmp_path: Path) -> None:
    """Two pieces of 524,289 and 524,288 elements: the second begins at no multiple of a sector."""
    run = Run(SwapConfig(tmp_path), numels=[ODD + 524_288])
    (master,), (twin,) = run.masters, run.twins
    twin.grad = torch.randn(ODD + 524_288)
    pieces = list(twin.grad.split([ODD, 524_288]))
    run.swapper.swap_out_gradients(master, [0, ODD], pieces)
    run.swapper.swap_in_optimizer_state(master)
    assert master.grad is not None
    assert torch.equal(bits(master.grad), bits(twin.grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_other_types_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    run = Run(SwapConfig(tmp_path), numels=[ODD])
    gradient = torch.randn(ODD).to(dtype)
    run.swapper.swap_out_gradients(run.masters[0], [0], [gradient])
    run.swapper.swap_in_optimizer_state(run.masters[0])
    assert run.masters[0].grad is not None
    assert torch.equal(run.masters[0].grad, gradient.float())


def test_no_gradient_is_zero(tmp_path: Path) -> None:
    run = Run(SwapConfig(tmp_path), numels=[ODD])
    run.swapper.swap_in_optimizer_state(run.masters[0])
    assert run.masters[0].grad is not None and not run.masters[0].grad.any()  # DeepSpeed scales it


def test_gradients_beyond_the_budget_go_to_the_drive(tmp_path: Path) -> None:
    run = Run(SwapConfig(tmp_path, buffer_count=STATES_AND_GRADIENT))
    run.train(1)
    written_nbytes = run.swapper.stats().write_nbytes
    run.backward()
    assert run.swapper.stats().write_nbytes > written_nbytes
    run.backward(pieces=1)  # of those that are away, too
    run.step()
    run.check()


def test_sub_groups_stay_in_memory_where_the_budget_has_room(tmp_path: Path) -> None:
    run = Run(SwapConfig(tmp_path, PLENTY))
    run.train(2)
    before = run.swapper.stats()
    run.train(2)
    run.check()
    assert run.swapper.stats() == before


def test_some_stay_where_there_is_room_for_some(tmp_path: Path) -> None:
    count = 9  # the step needs 4 buffers of the largest, the first two sub-groups take 4.5
    run = Run(SwapConfig(tmp_path, count))
    run.train(2)
    before = run.swapper.stats()
    run.train(1)
    run.check()
    assert before.read_nbytes < run.swapper.stats().read_nbytes
    assert 3 * 4 * sum(NUMELS) > run.swapper.stats().write_nbytes - before.write_nbytes > 0


@pytest.mark.parametrize("buffer_count", [4, PLENTY])
def test_optimizer_without_states(tmp_path: Path, buffer_count: int) -> None:
    run = Run(SwapConfig(tmp_path, buffer_count),
              make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    run.train(3)
    run.check()


@pytest.mark.parametrize("buffer_count", [1, PLENTY])
def test_momentum_made_before_the_first_write(tmp_path: Path, buffer_count: int) -> None:
    """A state that is there when its sub-group comes, and one that stays in memory."""
    run = Run(SwapConfig(tmp_path, buffer_count), numels=[ODD, ODD])
    momentum = torch.randn(ODD)
    in_memory = torch.randn(ODD)
    in_memory.swappable = False  # type: ignore[attr-defined]
    run.optimizer.state[run.masters[0]]["momentum_buffer"] = momentum
    run.optimizer.state[run.masters[1]]["momentum_buffer"] = in_memory
    wanted = momentum.clone()
    for _ in range(3):
        for number in range(2):
            run.swapper.swap_in_optimizer_state(run.masters[number])
            run.swapper.swap_in_optimizer_state(run.masters[number])  # again: it stays
            if number == 0:
                assert torch.equal(momentum, wanted)
                momentum.mul_(0.5)
                wanted.mul_(0.5)
            run.swapper.swap_out_optimizer_state(run.masters[number])
        assert momentum.numel() == 0
        assert in_memory.numel() == ODD
