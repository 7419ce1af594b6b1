"""A language model of two layers, the smallest that has all of one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.offload.runs import DIM
from tests.offload.structures import VOCABULARY


class TinyLanguageModel(nn.Module):
    """Two layers of attention, a tied head."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Parameter(torch.randn(8, DIM) / 4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, 0.0, norm_first=True, batch_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        length = numbers.shape[1]
        x = self.embedding(numbers) + self.positions[:length]
        for block in self.blocks:
            x = block(x, src_mask=self.mask[:length, :length], is_causal=True)
        return self.head(self.norm(x))


def language_loss(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), numbers[:, 1:].flatten())

    numbers = (x.detach()[..., 0].abs() * 7).long() % VOCABULARY
    return loss(model(numbers))
