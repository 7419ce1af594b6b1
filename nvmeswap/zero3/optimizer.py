"""The optimizer that `shard()` returns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.zero3.home import ShardedHome

if TYPE_CHECKING:
    from nvmeswap.zero3.swap import ZeroSwap


class ShardedOptimizer(SwappedOptimizer):
    """`SwappedOptimizer` over the shards of an FSDP2 model. `swap` has its counters and closes
    it."""

    swap: ZeroSwap
    norm_group: dist.ProcessGroup
    norm_device: torch.device

    def overlap_backward(self, settings: OverlapSettings) -> None:
        """Not for sharded parameters."""
        raise SwapUsageError(
            "updates during backward are not served for sharded parameters",
            fix="leave them out; nvmeswap.SwappedOptimizer has them",
        )

    def take_parameters_as_they_are(self) -> None:
        """Called when the model is built: those that were on meta have come to their device."""
        self._own(self._trained())

    def close(self) -> None:
        """As `swap.close()`."""
        super().close()
        self.swap.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, but only while the optimizer is being built."""
        if self._swapper is not None:
            raise SwapUsageError(
                "a group can't be added to an optimizer of sharded parameters",
                fix="set requires_grad before nvmeswap.zero3.shard",
            )
        super().add_param_group(param_group)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_, for gradients that lie in host memory, on all ranks.

        Call it between backward and step (torch's own sees no gradient here and clips nothing).
        Returns the total norm over all ranks. The order of the sum is FSDP2's: parts of a parameter
        are summed over the ranks first, then the parameters; on gloo the result is bitwise equal.
        From the second call on, norms are taken as the gradients arrive; they are scaled while they
        are used, so nothing passes over them here.
        """
        home = self._home
        assert isinstance(home, ShardedHome)
        home.pending_scales = self._scales
        keys = [key for key in self._by_key if home.gradients.get(key) is not None]
        for key in keys:
            home.apply_scale(key)
        parts = torch.zeros(len(keys), device=self.norm_device)
        for index, norm in enumerate(home.gradients.norms(keys, norm_type)):
            parts[index] = norm
        norms = self._over_ranks(parts, norm_type)
        total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).to("cpu")
        self._scales.update(dict.fromkeys(keys, scale))
        return total

    def _over_ranks(self, parts: torch.Tensor, norm_type: float) -> torch.Tensor:
        if math.isinf(norm_type):
            dist.all_reduce(parts, dist.ReduceOp.MAX, group=self.norm_group)
            return parts
        powers = parts.pow(norm_type)
        dist.all_reduce(powers, dist.ReduceOp.SUM, group=self.norm_group)
        return powers.pow(1.0 / norm_type)
