"""Clipping after each micro-batch, as some loops do, equals the run in RAM."""

from __future__ import annotations

from pathlib import Path

import torch

import nvmeswap.zero3
from tests.zero3.cases import Case


def test_gradient_that_was_clipped_is_scaled_before_another_is_added(
    one_rank: None, tmp_path: Path
) -> None:
    """The scale waits until the gradient is used: it must not be given to the next one, too."""

    def model_of() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))

    theirs = model_of()
    resident = torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=True)
    adamw = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {**Case().config(tmp_path), "optimizer": adamw}
    ours, swapped = nvmeswap.zero3.shard(model_of(), config)
    for step in range(3):
        for micro_batch in range(3):
            torch.manual_seed(10 * step + micro_batch)
            batch = torch.randn(4, 300)
            for model in (theirs, ours):
                model(batch).square().sum().backward()
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            assert torch.equal(swapped.clip_grad_norm_(1.0).cpu(), expected)
        for optimizer in (resident, swapped):
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), other)
    swapped.close()
