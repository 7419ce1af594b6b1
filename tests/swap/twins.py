"""An optimizer of ours and the plain one it must equal: fp32 masters in RAM, the same gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nvmeswap.swap.sub_group import MASTER
from nvmeswap.swap.swapped import SwappedOptimizer

BF16 = torch.bfloat16
FP32 = torch.float32
Shape = tuple[int, ...]


class Lion(Optimizer):
    """As in its paper: the sign of an interpolated momentum, and decoupled decay."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                direction = (average * beta1 + parameter.grad * (1 - beta1)).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction * rate)
                average.mul_(beta2).add_(parameter.grad * (1 - beta2))


@dataclass(frozen=True)
class Recipe:
    """An optimizer class, its options, and those that a second group has of its own."""

    kind: type[Optimizer]
    options: dict[str, Any]
    second_group: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind.__name__}{self.options}"

    def groups(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Every other parameter in a group of its own, if there are two or more."""
        if len(params) < 2:
            return [{"params": list(params)}]
        return [{"params": params[::2]}, {"params": params[1::2], **self.second_group}]

    def plain(self, params: Any, *, fused: bool = True) -> Optimizer:
        """torch's own, fused where the class knows that (and `fused`)."""
        fused = fused and "fused" in inspect.signature(self.kind).parameters
        choice: dict[str, Any] = {"fused": True} if fused else {}
        return self.kind(params, **self.options, **choice)


ADAMW = Recipe(torch.optim.AdamW, {"lr": 1e-2}, {"lr": 3e-3, "betas": (0.8, 0.99)})
RECIPES = [
    ADAMW,
    Recipe(
        torch.optim.Adam,
        {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
        {"lr": 1e-3, "weight_decay": 0.0},
    ),
    Recipe(torch.optim.SGD, {"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}),
    Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}),
    Recipe(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}
    ),
    Recipe(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, {"lr": 0.01}),
    Recipe(torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}, {"lr": 1e-3}),
    Recipe(torch.optim.NAdam, {"lr": 1e-2}, {"lr": 1e-3, "weight_decay": 0.1}),
    Recipe(Lion, {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-2, "betas": (0.95, 0.98)}),
]


def parameters_of(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], seed: int = 0
) -> list[torch.nn.Parameter]:
    """Parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


class Twins:
    """`make(groups)` builds ours over `params`; the other one has masters like them, on `device`,
    and is fused where ours is (on a GPU not every class can be)."""

    def __init__(
        self,
        recipe: Recipe,
        params: list[torch.nn.Parameter],
        make: Callable[[Any], Optimizer],
        device: str = "cpu",
    ) -> None:
        self.recipe = recipe
        self.params = list(params)
        self.device = device
        self.masters = [self._master_of(parameter) for parameter in params]
        self.swapped: SwappedOptimizer = make(recipe.groups(self.params))  # type: ignore[assignment]
        fused = device == "cpu" or bool(self.swapped.defaults.get("fused"))
        self.plain = recipe.plain(recipe.groups(self.masters), fused=fused)

    @property
    def both(self) -> tuple[Optimizer, Optimizer]:
        return self.swapped, self.plain

    def add_group(self, params: list[torch.nn.Parameter], **options: Any) -> None:
        masters = [self._master_of(parameter) for parameter in params]
        self.swapped.add_param_group({"params": params, **options})
        self.plain.add_param_group({"params": masters, **options})
        self.params += params
        self.masters += masters

    def backward(self, seed: int, without: Collection[int] = ()) -> None:
        """Adds to gradients what depends on the seed alone; not `without`, by index."""
        generator = torch.Generator().manual_seed(1000 + seed)
        for index, parameter in enumerate(self.params):
            values = torch.randn(parameter.shape, generator=generator).to(parameter)
            if index in without or not parameter.requires_grad:
                continue
            parameter.grad = values if parameter.grad is None else parameter.grad + values

    def step_plain(self) -> None:
        for parameter, master in zip(self.params, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(self.device, FP32)
        self.plain.step()

    def step(self) -> None:
        self.step_plain()
        self.swapped.step()

    def assert_same_parameters(self) -> None:
        for index, (mine, master) in enumerate(zip(self.params, self.masters, strict=True)):
            same = torch.equal(mine.cpu(), master.to(mine.dtype).cpu())
            assert same, f"parameter {index}, {mine.dtype}"

    def assert_same(self) -> None:
        """Parameters, masters, states and scalars."""
        self.assert_same_parameters()
        saved = self.swapped.state_dict()["state"]
        expected = self.plain.state_dict()["state"]
        numbered = [p for group in self.swapped.param_groups for p in group["params"]]
        places = {parameter: index for index, parameter in enumerate(self.params)}
        for number, parameter in enumerate(numbered):
            state, master = dict(saved.get(number, {})), self.masters[places[parameter]]
            if MASTER in state:
                assert torch.equal(state.pop(MASTER), master.cpu()), number
            if parameter.numel() and (number in saved or self.recipe.kind is not ADAGRAD):
                assert_same_states(state, expected.get(number, {}), f"parameter {number}")

    def _master_of(self, parameter: Tensor) -> torch.nn.Parameter:
        master = torch.nn.Parameter(parameter.detach().to(self.device, FP32, copy=True))
        master.requires_grad_(parameter.requires_grad)
        return master


ADAGRAD = torch.optim.Adagrad  # its plain states are there before the first step


def assert_same_states(ours: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    expected = {name: value for name, value in expected.items() if value is not None}
    assert ours.keys() == expected.keys(), what
    for name, value in expected.items():
        is_tensor = isinstance(value, Tensor)
        same = torch.equal(ours[name], value.cpu()) if is_tensor else ours[name] == value
        assert same, f"{what}: {name}"
