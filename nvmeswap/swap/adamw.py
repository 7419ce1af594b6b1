"""`SwappedAdamW`: torch.optim.AdamW with its state on NVMe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvmeswap.swap.swapped import Params, SwappedOptimizer


class SwappedAdamW(SwappedOptimizer):
    """AdamW whose fp32 state lives on NVMe and is in memory only while it is updated.

        optimizer = SwappedAdamW(model.parameters(), lr=1e-3, nvme_path="/mnt/nvme")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.close()

    Args: as torch.optim.AdamW; `nvme_path` and `settings` as in `SwappedOptimizer`, which this is
    with `torch.optim.AdamW`, and which says what it raises.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        nvme_path: str | Path | Sequence[str | Path],
        **settings: Any,
    ) -> None:
        super().__init__(
            torch.optim.AdamW,
            params,
            nvme_path=nvme_path,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            **settings,
        )
