"""`parameter.grad` shows the gradient that is in host memory, and setting it to None forgets it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from tests.oracle import first_difference
from tests.zero3.loops import Accumulation
from tests.zero3.programs import (
    Dice,
    Program,
    config,
    run_in_ram,
    run_swapped,
    sharded,
)


class ClippedByTorch(Accumulation):
    """torch's own function, by norm and by value; gradients are looked at and changed."""

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        parameters = list(model.parameters())
        nn.utils.clip_grad_value_(parameters, 0.02)
        total = nn.utils.clip_grad_norm_(parameters, 0.1).full_tensor()
        numbers = [p.grad.norm().full_tensor().item() for p in parameters]
        parameters[1].grad.mul_(0.5)
        parameters[3].grad = None
        self.clips = False
        return [total.item(), *numbers, *super().update(model, optimizer)]


class ForgottenByHand(Accumulation):
    """`p.grad = None` in a loop over the parameters, and in the middle of the micro-batches."""

    clips = False

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        if is_last:
            for parameter in model.parameters():
                parameter.grad = None

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return []


class ZeroedInPlace(Program):
    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return [p.grad.abs().sum().full_tensor().item() for p in model.parameters()]


class ScaledByTorch(Program):
    """GradScaler, with a loss that overflows once."""

    steps = 4

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        if not hasattr(self, "scaler"):
            self.scaler, self.turn = torch.amp.GradScaler("cpu", init_scale=4.0), 0
        self.turn += 1
        loss = self.loss(model, dice) * (float("inf") if self.turn == 2 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return [self.scaler.get_scale()]


@pytest.mark.parametrize("program", [ClippedByTorch, ForgottenByHand, ZeroedInPlace])
def test_what_users_do_to_gradients_counts(
    one_rank: None, tmp_path: Path, program: type[Program]
) -> None:
    """field case D10"""
    difference = first_difference(run_swapped(program(), tmp_path, 1), run_in_ram(program()))
    assert difference is None


@pytest.fixture
def model_and_optimizer(one_rank: None, tmp_path: Path) -> Iterator[tuple[nn.Module, Any]]:
    program = Program()
    model, mesh = sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, config(program, tmp_path), mesh)
    yield model, optimizer
    optimizer.close()


def test_gradient_is_one_object_that_reads_as_its_values(
    model_and_optimizer: tuple[nn.Module, Any],
) -> None:
    """field case D10"""
    model, optimizer = model_and_optimizer
    weight = model.head.weight
    batch = torch.ones(4, 24)
    model(batch).sum().backward()
    first = weight.grad
    once = first.full_tensor().clone()
    assert once.abs().sum() > 0
    model(batch).sum().backward()
    assert weight.grad is first
    assert torch.equal(first.full_tensor(), once + once)
    local = first._local_tensor
    assert torch.equal(pickle.loads(pickle.dumps(local)), once + once)
    assert local.tolist() == (once + once).tolist()
    optimizer.zero_grad()
    assert weight.grad is None
    with pytest.raises(SwapUsageError, match="forgotten"):
        first.full_tensor().clone()


def test_model_zero_grad_reaches_parameters_that_are_gathered(
    model_and_optimizer: tuple[nn.Module, Any],
) -> None:
    """After an evaluation the root shows its gathered parameters, which have no gradient."""
    model, optimizer = model_and_optimizer
    model(torch.ones(4, 24)).sum().backward()
    with torch.no_grad():
        model(torch.ones(4, 24))
    model.zero_grad()
    assert optimizer.swap.stats().optimizer.gradient_nbytes == 0
