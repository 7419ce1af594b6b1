"""ElementwiseOptimizer refuses, by name, what can't be stepped piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.elementwise import ElementwiseOptimizer


class Rule(Optimizer):
    """Base of small classes, each with one `change` to a parameter that is or isn't allowed."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.change(parameter, parameter.grad, group))

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient


class Lamb(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * parameter.norm() / gradient.norm()


class CentralisedGradient(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        if gradient.dim() == 1:
            return gradient
        return gradient - gradient.mean(dim=1, keepdim=True)


class Clipped(Rule):
    """Differs only where the gradient's mean square is large."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / max(1.0, gradient.square().mean().item())


class Noisy(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient + torch.randn_like(gradient)


class CountsInItself(Rule):
    """Would do something every tenth step."""

    count = 0

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        self.count += 1
        return gradient if self.count % 10 else 2 * gradient


class CountsInGroup(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        group["count"] = group.get("count", 0) + 1
        return gradient if group["count"] % 10 else 2 * gradient


class KeepsNorm(Rule):
    """The update is elementwise, but a scalar of the state isn't."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter]["norm"] = gradient.norm()
        return gradient


class LateState(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if state:
            state["last"] = gradient.clone()
        state["step"] = state.get("step", 0) + 1
        return gradient


class HalfState(Rule):
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter]["last"] = gradient.bfloat16()
        return gradient


class Trusting(Rule):
    """Elementwise without decay, and not with it."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr)
        self.defaults["weight_decay"] = weight_decay
        self.param_groups[0]["weight_decay"] = weight_decay

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * parameter.norm() if group["weight_decay"] else gradient


class NeedsClosure(Rule):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, Noisy])
def test_random_numbers_are_left_alone(optimizer_class: type[Optimizer]) -> None:
    """Else a run with swapping would draw other dropout masks."""
    before = torch.get_rng_state()
    try:
        ElementwiseOptimizer(optimizer_class, {})
    except SwapUsageError:
        assert optimizer_class is Noisy
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("optimizer_class", "options", "reason"),
    [
        (optim.Adafactor, {}, "row_var"),
        (optim.LBFGS, {}, "closure"),
        (optim.SparseAdam, {}, "dense gradient"),
        (NeedsClosure, {}, "closure"),
        (Lamb, {}, "not elementwise"),
        (CentralisedGradient, {}, "not elementwise"),
        (Clipped, {}, "not elementwise"),
        (Noisy, {}, "not elementwise"),
        (KeepsNorm, {}, "scalars"),
        (CountsInItself, {}, "changes the optimizer"),
        (CountsInGroup, {}, "changes the optimizer"),
        (LateState, {}, "after the first step"),
        (HalfState, {}, "bfloat16"),
        (Trusting, {"weight_decay": 0.1}, "not elementwise"),
        (optim.AdamW, {"capturable": True}, "capturable"),
        (optim.AdamW, {"differentiable": True}, "differentiable"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_pieces_can_not_serve_is_refused_by_name(
    optimizer_class: type[Optimizer], options: dict[str, Any], reason: str
) -> None:
    """Silently other weights would be worse than any error."""
    with pytest.raises(SwapUsageError) as error:
        ElementwiseOptimizer(optimizer_class, options)
    assert optimizer_class.__name__ in error.value.what
    assert reason in str(error.value)
    assert error.value.fix


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused_by_name() -> None:
    """It works on matrices."""
    with pytest.raises(SwapUsageError, match="Muon"):
        ElementwiseOptimizer(optim.Muon, {})


def test_options_that_break_the_rule_later_are_refused() -> None:
    """A group may have other options than the constructor's."""
    rule = ElementwiseOptimizer(Trusting, {})
    for broken in ({"weight_decay": 0.1}, {"differentiable": True}):
        with pytest.raises(SwapUsageError, match="Trusting"):
            rule.states_of({**rule.defaults, **broken})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, ValueError),
        ({"betas": (2.0, 0.9)}, ValueError),
        ({"learning_rate": 1.0}, TypeError),
        ({"fused": True, "foreach": True}, RuntimeError),
    ],
)
def test_wrong_options_raise_as_the_class_does(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """The class knows its options best."""
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(error) as theirs:
        optim.AdamW([parameter], **options)
    with pytest.raises(error) as ours:
        ElementwiseOptimizer(optim.AdamW, options)
    assert str(ours.value) == str(theirs.value)
