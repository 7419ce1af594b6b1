"""A model whose blocks may be run in any way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nvmeswap import OffloadManager
from tests.offload.runs import DIM

Managed = Callable[..., tuple[nn.Module, nn.Module, OffloadManager]]
"""Of the fixture `pair`."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), nn.Dropout())


class Blocks(nn.Module):
    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.run = run or (lambda block, x: block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = x + self.run(each, x)
        return self.norm(x)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
