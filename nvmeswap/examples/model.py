"""A byte-level, decoder-only transformer: as plain as it can be and still be a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nvmeswap.examples.text import TOKEN_COUNT


class Block(nn.Module):
    """Causal attention, then an MLP; each is added to what came in, which it sees normalised."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        projected = self.query_key_value(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class Transformer(nn.Module):
    """Token and position embeddings, `layers` blocks, a head that is not tied to the embedding.

    All parameters sit in torch's own layers, so the model can also be built on the meta device.
    The 257 tokens and the `sequence_length + 1` positions divide by no usual number of ranks:
    shards are uneven, as in real models.
    """

    def __init__(
        self,
        dim: int,
        layers: int,
        heads: int,
        sequence_length: int,
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.tokens = nn.Embedding(TOKEN_COUNT, dim)
        self.positions = nn.Embedding(sequence_length + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, TOKEN_COUNT, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, `(batch, length, 257)`, for `tokens` `(batch, length)`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            if self.activation_checkpointing:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, computed in fp32 whatever the model's precision."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
