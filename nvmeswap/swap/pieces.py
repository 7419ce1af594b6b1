"""The AdamW update by cache-sized pieces, with torch's fused kernel.

A piece is read, updated and converted while it is in the cache: gradients of another dtype are
upcast, and the new parameter values are produced, piece by piece. Pieces begin at multiples of 16
elements from the beginning of the shard, where the fused kernel gives the same bits as one call
over the whole tensor (its vector loop and its remainder loop round differently).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvmeswap.errors import SwapConfigError

PIECE_NUMEL = 1 << 17  # 512 KiB of fp32 for each of four tensors: fits a core's second-level cache


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """One group's options, as in torch.optim.AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamWOptions:
        """The options of one of an optimizer's `param_groups`."""
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )


def check_options(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise SwapConfigError for options outside the limits of torch.optim.AdamW."""
    try:
        beta1, beta2 = betas
        right = {
            "lr": float(lr) >= 0,
            "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
            "eps": float(eps) >= 0,
            "weight_decay": float(weight_decay) >= 0,
        }
    except (TypeError, ValueError) as error:
        raise SwapConfigError(
            f"an option of AdamW is no number: {error}",
            key="optimizer.params",
            fix="give numbers, betas as a pair",
        ) from None
    for name, is_right in right.items():
        if not is_right:
            raise SwapConfigError(
                f"AdamW option {name} is out of its range",
                key=f"optimizer.params.{name}",
                fix="lr, eps and weight_decay are at least 0, betas in [0, 1)",
            )


@torch.no_grad()
def adamw_update(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    options: AdamWOptions,
    output: torch.Tensor | None,
) -> None:
    """Update `master`, `exp_avg` and `exp_avg_sq` in place; all flat [numel] in host memory, fp32.

    `gradient` may have any floating dtype. `step` counts from 1. `output`, if given, receives the
    new values of `master` in its own dtype. Equal to torch.optim.AdamW(fused=True), bit for bit.
    """
    assert master.dtype is exp_avg.dtype is exp_avg_sq.dtype is torch.float32
    steps = torch.tensor(float(step))
    for begin in range(0, master.numel(), PIECE_NUMEL):
        piece = slice(begin, begin + PIECE_NUMEL)
        torch._fused_adamw_(
            [master[piece]],
            [gradient[piece].to(torch.float32)],
            [exp_avg[piece]],
            [exp_avg_sq[piece]],
            [],
            [steps],
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            weight_decay=options.weight_decay,
            eps=options.eps,
            amsgrad=False,
            maximize=options.maximize,
        )
        if output is not None:
            output[piece].copy_(master[piece])
