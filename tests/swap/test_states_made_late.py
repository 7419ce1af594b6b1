"""States of a parameter that its class left alone in its first step."""

from __future__ import annotations

from typing import Any

import torch

from tests.swap.conftest import Bench


class CarefulLion(torch.optim.Optimizer):
    """Lion, which leaves a parameter alone whose gradient is not finite: a state is made by the
    first gradient that is."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not bool(p.grad.isfinite().all()):
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                beta = group["beta"]
                update = state["exp_avg"] * beta + p.grad * (1 - beta)
                p.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta).add_(p.grad, alpha=1 - beta)


def gradient(number: int, step: int) -> torch.Tensor:
    if step == 0 and number % 2:
        return torch.full((4096,), torch.inf)
    return torch.randn(4096, generator=torch.Generator().manual_seed(100 * step + number))


def test_state_that_no_first_step_made_is_as_in_ram(bench: Bench) -> None:
    """What another sub-group left in the slot is not its state."""
    ours, theirs = (
        [torch.nn.Parameter(torch.linspace(-1, 1, 4096)) for _ in range(8)] for _ in range(2)
    )
    swapped = bench.optimizer(CarefulLion, ours)
    plain = CarefulLion(theirs)
    for step in range(4):
        for parameters, optimizer in ((ours, swapped), (theirs, plain)):
            for number, parameter in enumerate(parameters):
                parameter.grad = gradient(number, step)
            optimizer.step()
        differ = [n for n in range(8) if not torch.equal(ours[n], theirs[n])]
        assert not differ, (step, differ)
