"""Models of every structure, by name: how each is built, and how it is called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from tests.offload.runs import DIM, Forward, call, tensors_in

VOCABULARY = 11


@dataclass(frozen=True)
class Structure:
    """`frozen_only`: its parameters can't be updated, managed or not."""

    build: Callable[[], nn.Module]
    call: Forward = call
    frozen_only: bool = False


STRUCTURES: dict[str, Structure] = {}


def structure(
    call: Forward = call, frozen_only: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """A class or function that builds a model, under its own name."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        STRUCTURES[build.__name__] = Structure(build, call, frozen_only)
        return build

    return add


def tokens(model: nn.Module, x: torch.Tensor, number: int) -> Any:
    """An input without gradient."""
    return model((x.detach()[..., 0].abs() * 7).long() % VOCABULARY)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


# --- ties ----------------------------------------------------------------------------------------


@structure(tokens)
class TiedByParameter(nn.Module):
    """features F6, G5; field case E07"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x))


@structure()
def tied_by_storage() -> nn.Module:
    """Two parameters, one a transposed view of the other."""
    model = two_layers()
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    return model


@structure()
def slices_of_one_storage() -> nn.Module:
    """Packed weights, some of them overlapping."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    whole = torch.randn(3 * DIM + 8, DIM)
    for index, start in enumerate((0, DIM, 2 * DIM, 2 * DIM + 8)):
        model[index].weight = nn.Parameter(whole[start : start + DIM])
    return model


@structure()
class SharedModule(nn.Module):
    """One module under two names, called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.between = nn.Linear(DIM, DIM)
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


@structure(tokens)
class HeadReadsTheEmbeddingsWeight(nn.Module):
    """A tie without a second parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return linear(self.layer(self.embedding(numbers)), self.embedding.weight)


# --- who owns and who calls ----------------------------------------------------------------------


@structure()
class Orphans(nn.Module):
    """features A21, F8"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OrphanBlock(), OrphanBlock()])
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + self.bias
        return x


class OrphanBlock(nn.Module):
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(DIM))
        self.register_buffer("offset", torch.randn(DIM))
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.gate) + self.gate.sin() + self.offset


@structure()
class InLists(nn.Module):
    """Parameters of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(DIM) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(DIM), "b": torch.randn(DIM)})
        self.layers = nn.ModuleDict({"x": nn.ModuleList(two_layers()), "y": nn.Linear(DIM, DIM)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers["x"][1](x * self.listed[0] + self.listed[2])
        return self.layers["y"](x) * self.named["b"]


@structure()
class UncalledChild(nn.Module):
    """features F12; field case C05"""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(DIM, DIM)
        self.called = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(linear(x, self.child.weight, self.child.bias))


@structure()
class TwoLists(nn.Module):
    """features G6; field case C06"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        self.projections = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) + self.projections[index](x)
        return x


@structure(lambda model, x, number: model.decode(model.encode(x)))
class OtherMethods(nn.Module):
    """Its forward is never called. field case C05"""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(5, 7, 3, padding=1)
        self.up = nn.Sequential(nn.Conv1d(7, 5, 3, padding=1), nn.Tanh())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


structure(lambda model, x, number: model.forward(x))(type("ForwardItself", (SharedModule,), {}))


@structure()
def nested() -> nn.Module:
    """field case C10, E07"""
    return nn.Sequential(
        nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.LayerNorm(DIM))),
        nn.Sequential(OrphanBlock(), nn.Sequential(OrphanBlock())),
    )


@structure()
class SomeAreNeverUsed(nn.Module):
    """Their gradient stays None. features A28"""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@structure()
def partly_frozen() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


# --- tensors that are odd ------------------------------------------------------------------------


class Held(nn.Module):
    """Adds up what it holds."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(
            nn.Parameter(each, requires_grad=each.is_floating_point()) for each in tensors
        )
        self.factor = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.held:
            x = x * self.factor + each.sum()
        return x


@structure()
def strided() -> nn.Module:
    gaps = torch.randn(6, 8)[::2, ::3]
    return nn.Sequential(Held(torch.randn(4, 3).t(), gaps, torch.randn(9)[3:]), Held(gaps))


@structure(frozen_only=True)
def expanded() -> nn.Module:
    """More elements than memory."""
    return nn.Sequential(Held(torch.randn(3, 1).expand(3, 5)), Held(torch.randn(()).expand(4)))


@structure()
def scalars_and_empty_ones() -> nn.Module:
    """field case E01"""
    return nn.Sequential(
        Held(torch.randn(()), torch.empty(0), torch.empty(3, 0, 2), torch.randn(1)),
        Held(torch.empty(0)), nn.Linear(DIM, DIM),
    )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(DIM, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.fft.fft(x) * self.phases).sum(-1)


@structure()
def complex_ones() -> nn.Module:
    return nn.Sequential(Complex(), nn.Linear(DIM, DIM), Complex())


@structure(tokens)
class PaddedEmbedding(nn.Module):
    """Rows that get no gradient, and embeddings looked up without the module."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(VOCABULARY, DIM, padding_idx=0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, DIM))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows(numbers) + embedding(numbers, self.table)


# --- what goes in and what comes out -------------------------------------------------------------


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, *, states: torch.Tensor, scale: float) -> torch.Tensor:
        return self.layer(input=self.norm(input=states)) * scale


@structure(lambda model, x, number: model(states=x, scale=0.5))
def called_by_name() -> nn.Module:
    """features F14, 2E; section 4: 11"""
    return ByName()


@dataclass
class Answer:
    states: torch.Tensor
    more: dict[str, Any]


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class Answers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            x = next(tensors_in(x))
        y = self.layer(x)
        if self.kind == "dict":
            return OrderedDict(states=y, none=None, number=3)
        if self.kind == "dataclass":
            return Answer(y, {"squares": [y * y, {"text": "no tensor"}]})
        return Pair(y, [y + 1, y.detach()])


@structure()
def containers() -> nn.Module:
    """features F13"""
    return nn.Sequential(Answers("dict"), Answers("dataclass"), Answers("pair"))


@structure()
def changed_in_place() -> nn.Module:
    """features F11"""
    return nn.Sequential(
        nn.Linear(DIM, DIM), nn.ReLU(inplace=True), nn.Linear(DIM, DIM), AddsInPlace(),
        nn.Linear(DIM, DIM), nn.Flatten(), nn.Hardtanh(inplace=True),
    )


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.bias).mul_(2)


@structure()
class PartWithoutGradient(nn.Module):
    """features F3"""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.layer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.target = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        scale = self.time(x.new_ones(DIM))
        with torch.no_grad():
            wanted = self.target(x)
        return self.layer(x) * scale - wanted, wanted
