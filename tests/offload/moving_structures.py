"""Models whose calls differ from each other, whose buffers change, whose backward is their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from tests.offload.runs import DIM
from tests.offload.structures import structure


class Ordered(nn.Module):
    """Calls its blocks in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(6)])

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x).tanh()
        return x


ORDERS = ([0, 1, 5], [0, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [2, 2, 2, 0, 2], [1])


@structure(lambda model, x, number: model(x, ORDERS[number % len(ORDERS)]))
def any_order() -> nn.Module:
    """features G2, G3, section 4: 10; field case C09"""
    return Ordered()


@structure(lambda model, x, number: model(x, [0] * 5 + [1, 0]))
def repeated() -> nn.Module:
    return Ordered()


@structure()
class Conditional(nn.Module):
    """Which branch is taken depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if x.sum() > 0 else self.right(self.right(x))


@structure(lambda model, x, number: model(x, 3))
class Recursive(nn.Module):
    """A module that is running is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = self.layer(x)
        return self(x, depth - 1) * self.scale if depth else x


# --- buffers -------------------------------------------------------------------------------------


@structure()
class Buffers(nn.Module):
    """Changed in place, replaced, grown, dropped and added. features F7, section 4: 6"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("changed", torch.zeros(DIM))
        self.register_buffer("replaced", torch.zeros(DIM))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("grown", torch.zeros(0, DIM), persistent=False)
        self.register_buffer("dropped", torch.ones(DIM))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) + self.changed + self.replaced
        self.changed.add_(x.detach().mean((0, 1)))
        self.replaced = self.replaced * 0.5 + x.detach().mean((0, 1))
        self.hidden += 1
        self.count += 1
        self.grown = torch.cat([self.grown, x.detach()[0, :1]])
        if self.dropped is not None:
            x = x * self.dropped
        if self.count >= 2:
            self.dropped = None
            self.none = torch.ones(2)
        return x * self.hidden[0] + self.grown.sum()


@structure()
def buffers_in_blocks() -> nn.Module:
    """features G9"""
    return nn.Sequential(Buffers(), nn.Sequential(Buffers(), nn.Linear(DIM, DIM)))


@structure()
class OneBufferInTwoModules(nn.Module):
    """Like the rotary table that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(DIM)
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        for block in self.blocks:
            block.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * block.table.clone()
            block.table.mul_(1.01)
        return x


@structure()
class BufferOnAParameter(nn.Module):
    """A buffer that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.layer.register_buffer("first_row", self.layer.weight.detach()[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer.first_row


# --- backward ------------------------------------------------------------------------------------


class KeepsItsWeight(torch.autograd.Function):
    """On ctx, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, (grad.flatten(0, 1).t() @ x.flatten(0, 1))


class OwnBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepsItsWeight.apply(x, self.weight) + self.bias


@structure()
def own_backward() -> nn.Module:
    return nn.Sequential(*(OwnBackward(DIM, DIM) for _ in range(3)))


@structure()
class Views(nn.Module):
    """Autograd keeps views of the weights. features F1"""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3 * DIM, DIM) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (linear(x, part) for part in self.packed.chunk(3))
        return (query @ key.transpose(1, 2)).softmax(-1) @ value + self.packed[0]


@structure()
class ReturnsItsWeight(nn.Module):
    """What leaves a module may be its parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions(x.shape[1])) * self.positions(1)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, DIM))

    def forward(self, count: int) -> torch.Tensor:
        return self.table[:count]
