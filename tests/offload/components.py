"""Components of a small pipeline, and what they hold on the device."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class TextEncoder(nn.Module):
    """8 tokens of 16."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=16)
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embed(tokens))
        return out


class Denoiser(nn.Module):
    """With a scale of its own, and a buffer that no checkpoint has."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.hidden_size = 16
        self.sparse = False
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("frequencies", 1 / (torch.arange(16) + 1.0), persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x * self.scale + self.frequencies)
        return x.relu() if self.sparse else x


class Autoencoder(nn.Module):
    """Used by methods, and never called itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.encoder = nn.Linear(16, width)
        self.decoder = nn.Linear(width, 16)

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x - self.shift)
        return out

    def decode(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(x) + self.shift
        return out


def seeded(kind: type[nn.Module], *args: Any) -> nn.Module:
    """The same values every time, and frozen."""
    torch.manual_seed(7)
    return kind(*args).requires_grad_(False)


def resident_nbytes(components: Iterable[Any]) -> int:
    """On the device, all together."""
    return sum(component.stats().resident_nbytes for component in components)


def nbytes_of(kind: type[nn.Module]) -> int:
    module = kind()
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


TOKENS = torch.arange(8).view(1, 8)
