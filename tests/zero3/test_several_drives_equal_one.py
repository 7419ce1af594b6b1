"""A model whose shards and states are striped over several folders trains as over one."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

import nvmeswap.zero3
from nvmeswap.config import SameDriveWarning
from nvmeswap.io.drives import SlowDriveWarning


def train(places: list[Path]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(3)))
    place = {"device": "nvme", "nvme_path": [str(folder) for folder in places]}
    config = {
        "zero_optimization": {
            "stage": 3, "offload_param": place, "offload_optimizer": place,
            "sub_group_size": 300_000,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model, optimizer = nvmeswap.zero3.shard(model, config)
    try:
        for step in range(3):
            inputs = torch.randn(4, 700, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [drive.folder for drive in optimizer.swap.stats().drives] == places
        for folder in places:
            names = {path.name for path in folder.rglob("*.swp") if path.stat().st_size}
            assert names == {"params.swp", "optimizer.swp"}
        return [parameter.full_tensor().clone() for parameter in model.parameters()]
    finally:
        optimizer.swap.close()


def test_model_over_three_folders_equals_one(one_rank: None, tmp_path: Path) -> None:
    """Else more drives mean another model."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    alone = train(folders[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SameDriveWarning)
        warnings.simplefilter("ignore", SlowDriveWarning)
        several = train(folders)
    assert all(map(torch.equal, alone, several))
    assert not list(tmp_path.rglob("*.swp"))
