"""The shape of the coming `SwappedOptimizer`, over today's `SwappedAdamW`. To be replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nvmeswap.config import DEFAULT_SUB_GROUP_NUMEL, SwapBlock
from nvmeswap.errors import SwapConfigError
from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.timeline import Timeline


class SwappedOptimizer(SwappedAdamW):
    """AdamW only; a budget buys buffers of 14 bytes an element."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], params: Iterable[torch.Tensor], **options: Any
    ) -> None:
        if kind is not torch.optim.AdamW:
            raise SwapConfigError(f"{kind.__name__} is not served", key="optimizer",
                                  fix="use AdamW")
        swap = options.get("swap") or SwapBlock()
        if swap.host_memory_nbytes is not None:
            buffer_nbytes = options.get("sub_group_size", DEFAULT_SUB_GROUP_NUMEL) * 14
            options["buffer_count"] = max(1, swap.host_memory_nbytes // buffer_nbytes - 1)
        super().__init__(params, **options)

    @property
    def timeline(self) -> Timeline | None:
        return self.swapper.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.swapper.timeline = timeline
