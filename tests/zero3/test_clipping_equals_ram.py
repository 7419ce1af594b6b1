"""Clipping, by a call or by the JSON, gives the bits of torch's clip over gradients in RAM."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nvmeswap.errors import SwapUsageError
from tests.oracle import Run, first_difference
from tests.zero3.scaled import (
    assert_clipped_runs_equal,
    clip,
    resident,
    square,
    swapped,
    weights,
)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_of_any_order_equals_torch(
    one_rank: None, tmp_path: Path, norm_type: float
) -> None:
    """A norm that differs by one bit is another training run.  field case O01"""
    assert_clipped_runs_equal(tmp_path, norm_type=norm_type)


def test_norm_of_bf16_gradients_equals_torch(one_rank: None, tmp_path: Path) -> None:
    """Rounded as torch rounds it: else a model built in bf16 is clipped by another factor."""
    norms = []
    with swapped(tmp_path, torch.bfloat16) as pair:
        for model, optimizer in (pair, resident(dtype=torch.bfloat16)):
            square(model, 0).backward()
            norms += [[clip(model, optimizer, 1e9, each) for each in (1.0, 2.0, math.inf)]]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradient_clipping_of_the_json_equals_a_call(
    one_rank: None, tmp_path: Path, accumulation: int
) -> None:
    """DeepSpeed clips inside its step; the loop of a user who comes from there has no call."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool) -> Run:
        losses = []
        for step in range(4):
            for micro_batch in range(accumulation):
                loss = square(model, 4 * step + micro_batch)
                loss.backward()
                losses.append(loss.item())
            if clips:
                clip(model, optimizer, 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return Run(losses, weights(model))

    with swapped(tmp_path, gradient_clipping=0.05) as (model, optimizer):
        ours = run(model, optimizer, clips=False)
    assert first_difference(ours, run(*resident(), clips=True)) is None


def test_own_clip_goes_before_the_one_of_the_json(one_rank: None, tmp_path: Path) -> None:
    """A loop that clips already must not be clipped a second time; the next step is again."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, norms: list[float | None]) -> Run:
        losses = []
        for step, norm in enumerate(norms):
            square(model, step).backward()
            if norm is not None:
                losses.append(clip(model, optimizer, norm))
            optimizer.step()
            optimizer.zero_grad()
        return Run([], weights(model))

    with swapped(tmp_path, gradient_clipping=0.01) as (model, optimizer):
        ours = run(model, optimizer, [0.5, None, 0.3, None])
    assert first_difference(ours, run(*resident(), [0.5, 0.01, 0.3, 0.01])) is None


def test_clip_without_any_gradient_is_zero(one_rank: None, tmp_path: Path) -> None:
    """As torch: a branch that was not taken must not end the run."""
    with swapped(tmp_path, gradient_clipping=1.0) as (_, optimizer):
        for norm_type in (2.0, math.inf):
            assert float(optimizer.clip_grad_norm_(1.0, norm_type)) == 0.0
        optimizer.step()


def test_norm_of_no_order_is_refused(one_rank: None, tmp_path: Path) -> None:
    with swapped(tmp_path) as (model, optimizer):
        square(model, 0).backward()
        for norm_type in (0.0, -math.inf):
            with pytest.raises(SwapUsageError):
                optimizer.clip_grad_norm_(1.0, norm_type)


def test_scale_of_a_forgotten_gradient_is_forgotten(one_rank: None, tmp_path: Path) -> None:
    """model.zero_grad() after a clip: the next gradient must come unscaled, and come at all."""
    runs = []
    with swapped(tmp_path) as pair:
        for model, optimizer in (pair, resident()):
            square(model, 0).backward()
            clip(model, optimizer, 1e-3)
            model.zero_grad()
            square(model, 1).backward()
            optimizer.step()
            runs.append(Run([], weights(model)))
    assert first_difference(*runs) is None


class _Done(dist.Work):
    def wait(self, *args: object) -> bool:
        return True


class DeviceOnly(dist.ProcessGroup):
    """A group with a backend for one device alone, as NCCL has none for the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1)
        self.device = device
        self.reduced_count = 0

    def allreduce(self, tensors: list[torch.Tensor], *args: object) -> dist.Work:
        for tensor in tensors:
            if tensor.device != self.device:
                raise RuntimeError(f"No backend type associated with device type {tensor.device}")
        self.reduced_count += len(tensors)
        return _Done()


def test_norms_go_to_the_device_of_their_group(one_rank: None, tmp_path: Path) -> None:
    """Gradients are in host memory, where a group of GPUs can't reduce anything. A meta device
    stands in for the GPU: it takes tensors, and nothing comes back.  field case O01"""
    group = DeviceOnly(torch.device("meta"))
    with swapped(tmp_path) as (model, optimizer):
        square(model, 0).backward()
        optimizer.norm_group, optimizer.norm_device = group, group.device
        with pytest.raises(NotImplementedError, match="meta"):
            optimizer.clip_grad_norm_(1.0)
    assert group.reduced_count == 1


def test_gradient_that_stays_after_the_step_stays_clipped(one_rank: None, tmp_path: Path) -> None:
    """The next micro-batch is added to it, and another step uses it as it is."""
    runs = []
    with swapped(tmp_path) as pair:
        for model, optimizer in (pair, resident()):
            norms = []
            for step in range(3):
                square(model, step).backward()
                norms.append(clip(model, optimizer, 1e-2))
                optimizer.step()
                norms.append(float(model[0].weight.grad.full_tensor().norm()))
            optimizer.step()
            runs.append(Run(norms, weights(model)))
    assert first_difference(*runs) is None


def test_edit_through_a_view_counts(one_rank: None, tmp_path: Path) -> None:
    """The norm that was taken when the gradient came is not that of what is there now."""
    runs = []
    with swapped(tmp_path) as pair:
        for model, optimizer in (pair, resident()):
            norms = []
            for step in range(3):
                square(model, step).backward()
                with torch.no_grad():
                    model[0].weight.grad.to_local().view(-1)[:7].zero_()
                norms.append(clip(model, optimizer, 1e-2))
                optimizer.step()
                optimizer.zero_grad()
            runs.append(Run(norms, weights(model)))
    assert first_difference(*runs) is None
