"""What the first step reads, before any order was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nvmeswap.zero3
from tests.zero3.cases import Case
from tests.zero3.programs import DIM, Stack


@pytest.mark.parametrize("buffer_count", [2, 5])
def test_first_step_reads_each_shard_once_a_pass(
    one_rank: None, tmp_path: Path, buffer_count: int
) -> None:
    """Backward must not read ahead what it does not need next, and then throw it away."""
    settings = Case(optimizer="cpu", buffer_count=buffer_count).config(tmp_path)
    model, optimizer = nvmeswap.zero3.shard(Stack(12), settings)
    model(torch.ones(4, DIM)).square().sum().backward()
    read_nbytes = optimizer.swap.stats().store.read_nbytes
    optimizer.close()
    assert read_nbytes <= 2 * sum(4 * parameter.numel() for parameter in model.parameters())


def test_first_pass_finds_its_first_shards_under_way(one_rank: None, tmp_path: Path) -> None:
    """With one slot, one: and it is the right one, since nothing is read twice."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, optimizer = nvmeswap.zero3.shard(model, Case(buffer_count=1).config(tmp_path))
    assert optimizer.swap.stats().params.prefetch_count == 1
    model(torch.ones(2, 64))
    assert optimizer.swap.stats().store.read_nbytes == 4 * (64 * 64 * 4)
    optimizer.close()
