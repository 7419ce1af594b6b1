"""The model that is offloaded by all, and its input: residual blocks of two linear layers, and a
norm after them, as models have something outside of their blocks (diffusers prefetches only then).

Imports nothing of ours. Weights and input are the same in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """Of the model and its input. `dtype`: as torch names it."""

    blocks: int
    hidden: int
    tokens: int
    dtype: str

    @property
    def block_nbytes(self) -> int:
        return 2 * (self.hidden + 1) * self.hidden * self.torch_dtype.itemsize

    @property
    def blocks_nbytes(self) -> int:
        """Of all weights in blocks: what a forward has to bring to the device."""
        return self.blocks * self.block_nbytes

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.second = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(x)))


class Stack(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.hidden) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        normed: torch.Tensor = self.norm(x)
        return normed


def make_model(size: Size) -> Stack:
    """In RAM, frozen, for inference."""
    with torch.device("meta"):  # or torch would initialise it first
        model = Stack(size).to(size.torch_dtype)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    bound = size.hidden**-0.5
    for parameter in model.parameters():
        # In fp32, so that the same numbers are drawn for every dtype.
        drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        parameter.copy_(drawn)
    return model


def make_input(size: Size, device: str) -> torch.Tensor:
    drawn = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(1))
    return drawn.to(size.torch_dtype).to(device)
