"""shard() refuses models that it would train wrongly, by name and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from tests.zero3.cases import Case


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


def double() -> nn.Module:
    return nn.Linear(64, 64, dtype=torch.float64)


def offloaded_by_fsdp() -> nn.Module:
    return fully_shard(nn.Linear(64, 64), offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize("make", [frozen, double, offloaded_by_fsdp, nn.Identity])
def test_model_that_can_not_be_trained_is_refused(
    one_rank: None, tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    """Each of these would fail much later, or lose precision without a word."""
    with pytest.raises(SwapUsageError) as raised:
        nvmeswap.zero3.shard(make(), Case().config(tmp_path))
    assert raised.value.fix
    assert not list(tmp_path.rglob("*.swp"))


def test_model_that_is_swapped_already_is_refused(one_rank: None, tmp_path: Path) -> None:
    """A second swap space over the first would read through it for ever."""
    model, optimizer = nvmeswap.zero3.shard(nn.Linear(64, 64), Case().config(tmp_path))
    with pytest.raises(SwapUsageError, match="already"):
        nvmeswap.zero3.shard(model, Case().config(tmp_path))
    optimizer.swap.close()


def test_two_models_in_one_process_have_their_own_space(one_rank: None, tmp_path: Path) -> None:
    """As in a GAN; their files must not meet.  field case K02"""
    made = [
        nvmeswap.zero3.shard(nn.Linear(64, 64), Case().config(tmp_path)) for _ in range(2)
    ]
    for model, optimizer in made:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    assert len(list(tmp_path.rglob("optimizer.swp"))) == 2
    for _, optimizer in made:
        optimizer.swap.close()
