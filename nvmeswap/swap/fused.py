"""The fused kernels of torch's own optimizers, called without the Python around them.

On pieces that fit a cache that Python takes longer than the update. Each function makes a later
step (there is a state already) as its class does with `fused=True`, and a first one where
`FIRST_SCALARS` has the class; `ElementwiseOptimizer` proves that against the class, bit for bit,
and does without where it is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

States = Mapping[str, Tensor]
Options = Mapping[str, Any]
Kernel = Callable[[Tensor, Tensor, States, Mapping[str, Any], Options], dict[str, Any]]
"""(master, gradient, states, scalars, options of the group) to the scalars after the step."""


def _beside(master: Tensor, count: Tensor) -> Tensor:
    """A count of steps where the kernel needs it; nothing waits for a GPU."""
    if master.is_cpu:
        return count
    return torch.full_like(count, float(count), device=master.device)


def _adam_by(kernel: Callable[..., None]) -> Kernel:
    def step(
        master: Tensor, gradient: Tensor, states: States, scalars: Mapping[str, Any], group: Options
    ) -> dict[str, Any]:
        count = scalars["step"] + 1
        beta1, beta2 = group["betas"]
        kernel(
            [master],
            [gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [_beside(master, count)],
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        return {"step": count}

    return step


def _sgd(
    master: Tensor, gradient: Tensor, states: States, scalars: Mapping[str, Any], group: Options
) -> dict[str, Any]:
    torch._fused_sgd_(
        [master],
        [gradient],
        [states["momentum_buffer"]] if group["momentum"] else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )
    return {}


def _adagrad(
    master: Tensor, gradient: Tensor, states: States, scalars: Mapping[str, Any], group: Options
) -> dict[str, Any]:
    count = scalars["step"] + 1
    torch._fused_adagrad_(
        [master],
        [gradient],
        [states["sum"]],
        [_beside(master, count)],
        lr=group["lr"],
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
    return {"step": count}


FIRST_SCALARS: Mapping[type[torch.optim.Optimizer], Callable[[], dict[str, Any]]] = {
    each: lambda: {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for each in (torch.optim.Adam, torch.optim.AdamW)
}
"""Scalars of a parameter that was never stepped, for classes whose states are zeros then."""

KERNELS: Mapping[type[torch.optim.Optimizer], Kernel] = {
    torch.optim.Adam: _adam_by(torch._fused_adam_),
    torch.optim.AdamW: _adam_by(torch._fused_adamw_),
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
