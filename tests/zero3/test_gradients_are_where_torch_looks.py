"""`parameter.grad` shows the gradient that is in host memory. (loops.py has training with it.)"""

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
from tests.zero3.programs import Program, config, sharded


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
    model.to("cpu")
    local = weight.grad._local_tensor
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


def test_gradient_that_was_kept_is_no_other_one(
    model_and_optimizer: tuple[nn.Module, Any],
) -> None:
    """Gradient surgery: what is held under a name must not become the next gradient."""
    model, optimizer = model_and_optimizer
    weight, batch = model.head.weight, torch.ones(4, 24)
    model(batch).sum().backward()
    first, values = weight.grad, weight.grad.full_tensor().clone()
    weight.grad = None
    (4 * model(batch).sum()).backward()
    assert torch.equal(weight.grad.full_tensor(), 4 * values)
    with pytest.raises(SwapUsageError, match="replaced by a later one"):
        first.full_tensor().clone()
    weight.grad = first
    with pytest.raises(SwapUsageError, match="forgotten or replaced"):
        optimizer.step()
