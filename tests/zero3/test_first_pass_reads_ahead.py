"""The order of the first pass is guessed, so that its reads, too, run ahead."""

from __future__ import annotations

from pathlib import Path

import torch

import nvmeswap.zero3
from tests.zero3.cases import Case


def test_first_pass_finds_its_first_shards_under_way(one_rank: None, tmp_path: Path) -> None:
    """With one slot, one: and it is the right one, since nothing is read twice."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, optimizer = nvmeswap.zero3.shard(model, Case(buffer_count=1).config(tmp_path))
    assert optimizer.swap.stats().params.prefetch_count == 1
    model(torch.ones(2, 64))
    assert optimizer.swap.stats().store.read_nbytes == 4 * (64 * 64 * 4)
    optimizer.close()
