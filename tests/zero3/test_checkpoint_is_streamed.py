"""Saving, loading and exporting take the memory of a sub-group, not of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import nvmeswap.zero3
from tests.zero3.cases import Case

LAYERS, WIDTH = 12, 1024
STATE_NBYTES = 12 * LAYERS * WIDTH * WIDTH  # master and two moments
SUB_GROUP_NUMEL = 128 * 1024
# A sub-group read, its copy in DCP, and what the allocator keeps.
MOST_NBYTES = 24 * 1024**2


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers[::2]:
            layer.requires_grad_(False)
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak_nbytes(call: Any) -> int:
    """How far resident memory rose above what it was before."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def test_state_many_times_as_large_is_saved_loaded_and_exported(
    one_rank: None, tmp_path: Path
) -> None:
    """field cases F01, F06"""
    (tmp_path / "nvme").mkdir()
    config = Case(buffer_count=2).config(tmp_path / "nvme")
    config["zero_optimization"]["sub_group_size"] = SUB_GROUP_NUMEL
    model, optimizer = nvmeswap.zero3.shard(Wide(), config)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert STATE_NBYTES > 5 * MOST_NBYTES
    calls = {
        "save": lambda: nvmeswap.zero3.save(model, optimizer, tmp_path / "saved"),
        "load": lambda: nvmeswap.zero3.load(model, optimizer, tmp_path / "saved"),
        "export": lambda: nvmeswap.zero3.export(
            model, optimizer, tmp_path / "exported", dtype=torch.float32
        ),
    }
    calls["save"]()  # once for what torch loads lazily
    peaks = {name: peak_nbytes(call) for name, call in calls.items()}
    assert max(peaks.values()) < MOST_NBYTES, peaks
    optimizer.close()
