"""The model that is trained on both sides, and its data: blocks as in a transformer's MLP, bf16.

Imports nothing of ours. Weights and batches are the same for both: drawn in fp32, by generators of
their own, whatever a library does to torch's factory functions meanwhile.
"""

from __future__ import annotations

from typing import Any

from mlp import HIDDEN

_ROWS = 8


def fp32_product(torch: Any) -> Any:
    """x @ weight.t(), computed in fp32 and kept, for backward too, in bf16: torch's bf16 product
    takes ten times as long on processors without instructions for it, and would hide all that is
    to be measured."""

    class Product(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return (x.float() @ weight.float().t()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, Any]:
            x, weight = ctx.saved_tensors
            exact = gradient.float()
            of_x = (exact @ weight.float()).to(x.dtype)
            return of_x, (exact.t() @ x.float()).to(weight.dtype)

    return Product.apply


def make_model(torch: Any, blocks: int, device: str = "cpu") -> Any:
    """On a GPU weights are drawn there (other numbers), and multiplied as they are."""
    product = fp32_product(torch) if device == "cpu" else torch.nn.functional.linear
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Any:
        values = torch.rand(*shape, generator=generator, device=device) - 0.5
        return torch.nn.Parameter((values * (2 / shape[-1] ** 0.5)).to(torch.bfloat16))

    class Linear(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = drawn(outputs, inputs)
            self.bias = drawn(outputs)

        def forward(self, x: Any) -> Any:
            return product(x, self.weight) + self.bias

    class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.up = Linear(HIDDEN, 4 * HIDDEN)
            self.down = Linear(4 * HIDDEN, HIDDEN)
            self.norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.bfloat16, device=device)

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


def make_batch(torch: Any, rows: int = _ROWS, device: str = "cpu") -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in "xy")
    return x, y
