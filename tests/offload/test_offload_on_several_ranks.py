"""More than one process: right, or refused; never trained apart in silence. features A4, A30"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.offload.runs import input_of, stack
from tests.zero3.ranks import run_ranks


def plain_weights() -> dict[str, torch.Tensor]:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(input_of(10 * step + rank)).square().mean() / 2).backward()
        optimizer.step()
    return model.state_dict()


def test_ranks_train_one_model_or_are_told_that_they_can_not(tmp_path: Path) -> None:
    """Gradients are averaged over both ranks, of each way to combine the two wrappers."""
    first, second = run_ranks(2, "all_ways", tmp_path, module="tests.offload.ranks")
    expected = plain_weights()
    for way, weights in first.items():
        if isinstance(weights, str):
            assert isinstance(second[way], str), way
            continue
        for name, tensor in weights.items():
            assert torch.equal(tensor, second[way][name]), (way, name)
            torch.testing.assert_close(tensor, expected[name], msg=f"{way}: {name}")
