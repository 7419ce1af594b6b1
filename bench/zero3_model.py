"""The model that is trained on both sides, and its data: blocks as in a transformer's MLP, bf16.

Imports nothing of ours. Weights and batches are the same for both: drawn in fp32, by generators of
their own, whatever a library does to torch's factory functions meanwhile.
"""

from __future__ import annotations

from typing import Any

from mlp import HIDDEN

_BATCH = 8


def make_model(torch: Any, blocks: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Any:
        values = (torch.rand(*shape, generator=generator) - 0.5) * (2 / shape[-1] ** 0.5)
        return torch.nn.Parameter(values.to(torch.bfloat16))

    class Linear(torch.nn.Module):  # type: ignore[name-defined,misc]
        """Multiplies in fp32: torch's bf16 product takes ten times as long on processors without
        instructions for it, and would hide all that is to be measured."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = drawn(outputs, inputs)
            self.bias = drawn(outputs)

        def forward(self, x: Any) -> Any:
            product = torch.nn.functional.linear(x.float(), self.weight.float(), self.bias.float())
            return product.to(x.dtype)

    class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = Linear(HIDDEN, 4 * HIDDEN)
            self.down = Linear(4 * HIDDEN, HIDDEN)
            self.norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Stack(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: Any, y: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.mse_loss(x.float(), y.float())

    return Stack()


def make_batch(torch: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(_BATCH, HIDDEN, generator=generator).to(torch.bfloat16) for _ in "xy")
    return x, y
