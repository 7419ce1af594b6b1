"""The optimizer that `shard()` returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.zero3.home import ShardedHome

if TYPE_CHECKING:
    from nvmeswap.zero3.swap import ZeroSwap


class ShardedAdamW(SwappedAdamW):
    """`SwappedAdamW` over the shards of an FSDP2 model. `swap` has its counters and closes it."""

    swap: ZeroSwap
    norm_group: dist.ProcessGroup
    norm_device: torch.device

    def close(self) -> None:
        """As `swap.close()`."""
        self._swapper = None
        self.swap.close()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, for gradients that lie in host memory, on all ranks.

        Call it between backward and step (torch's own sees no gradient here and clips nothing).
        Returns the total norm over all ranks. The order of the sum is FSDP2's: parts of a parameter
        are summed over the ranks first, then the parameters; on gloo the result is bitwise equal.
        """
        home = self._home
        assert isinstance(home, ShardedHome)
        gradients = [
            gradient
            for parameter in self._trained()
            if (gradient := home.gradient(parameter)) is not None
        ]
        parts = torch.zeros(len(gradients), device=self.norm_device)
        for index, gradient in enumerate(gradients):
            if gradient.numel():
                parts[index] = torch.linalg.vector_norm(gradient, norm_type)
        norms = self._over_ranks(parts, norm_type)
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).to("cpu")
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return total

    def _over_ranks(self, parts: torch.Tensor, norm_type: float) -> torch.Tensor:
        if math.isinf(norm_type):
            dist.all_reduce(parts, dist.ReduceOp.MAX, group=self.norm_group)
            return parts
        powers = parts.pow(norm_type)
        dist.all_reduce(powers, dist.ReduceOp.SUM, group=self.norm_group)
        return powers.pow(1.0 / norm_type)
