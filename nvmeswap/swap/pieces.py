"""The AdamW update by cache-sized pieces, with torch's fused kernel.

A piece is read, updated and converted while it is in the cache: gradients of another dtype are
upcast, and the new parameter values are produced, piece by piece. Pieces begin at multiples of 16
elements from the beginning of the shard, where the fused kernel gives the same bits as one call
over the whole tensor (its vector loop and its remainder loop round differently).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
