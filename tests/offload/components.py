"""Components of a small pipeline, and what they hold on the device."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

DIM = 64  # a weight is many pages of a drive


class TextEncoder(nn.Module):
    """Of up to 50 tokens."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=DIM)
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embed(tokens))
        return out


class Denoiser(nn.Module):
    """With a scale of its own, and a buffer that no checkpoint has."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.hidden_size = DIM
        self.sparse = False
        self.scale = nn.Parameter(torch.ones(DIM))
        self.register_buffer("frequencies", 1 / (torch.arange(DIM) + 1.0), persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, DIM)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x * self.scale + self.frequencies)
        return x.relu() if self.sparse else x


class Autoencoder(nn.Module):
    """Used by methods, and never called itself."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(DIM))
        self.encoder = nn.Linear(DIM, width)
        self.decoder = nn.Linear(width, DIM)

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
