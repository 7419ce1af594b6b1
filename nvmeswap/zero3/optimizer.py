"""The optimizer that `shard()` returns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.swap.traffic import SubGroup
from nvmeswap.zero3.home import ShardedHome

if TYPE_CHECKING:
    from nvmeswap.zero3.swap import ZeroSwap


class ShardedOptimizer(SwappedOptimizer):
    """`SwappedOptimizer` over the shards of an FSDP2 model. `swap` has its counters and closes
    it.

    `gradient_clipping`: the norm that `step` clips to where nobody clipped since the last one; 0:
    it does not. `expects_scaler`: gradients are of fp16, and too small unless the loss was scaled.
    """

    swap: ZeroSwap
    norm_group: dist.ProcessGroup
    norm_device: torch.device
    gradient_clipping: float = 0.0
    expects_scaler: bool = False
    _is_clipped: bool = False

    def overlap_backward(self, settings: OverlapSettings) -> None:
        """From now on update during backward, from the second step on: the first one shows how
        often FSDP2 tells of each gradient. To be called on all ranks. An error in such a backward
        leaves some parameters updated, and all is refused until a checkpoint is loaded."""
        if settings.clip_norm is not None:
            raise SwapUsageError(
                "a gradient's norm over all ranks is not known in time",
                fix="leave out clip_norm, or don't overlap",
            )
        super().overlap_backward(settings)

    def take_parameters_as_they_are(self) -> None:
        """Called when the model is built: those that were on meta have come to their device."""
        self._own(self._trained())

    def close(self) -> None:
        """As `swap.close()`."""
        super().close()
        self.swap.close()

    def save(self, path: str | Path) -> None:
        """As `SwappedOptimizer.save`, with one rank; `zero3.save` is for any number."""
        if not self._home.is_alone:
            raise SwapUsageError(
                "each rank has states of its own shards, and one file would keep the last rank's",
                fix="use nvmeswap.zero3.save",
            )
        super().save(path)

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

        Call it between backward and step. (torch's own works, but passes over the gradients twice,
        on a GPU by way of it.) Returns the total norm over all ranks. The order of the sum is
        FSDP2's: parts of a parameter are summed over the ranks first, then the parameters; on gloo
        the result is bitwise equal. From the second call on, norms are taken as the gradients
        arrive; they are scaled while they are used, so nothing passes over them here.
        """
        self._refuse_to_clip_in_overlap()
        self._refuse_to_clip_twice()
        self._refuse_tensor_parallel()
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise SwapUsageError(
                f"there is no norm of order {norm_type} here", fix="use 1, 2, or math.inf"
            )
        home = self._sharded_home
        keys = self._keys_to_change()
        self._is_clipped = True
        if not keys:
            return torch.zeros((), device=self.norm_device)
        dtypes = {home.gradients.dtype(key) for key in keys}
        # As torch: norms of bf16 gradients are bf16.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        parts = torch.zeros(len(keys), dtype=dtype, device=self.norm_device)
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

    def unscale_gradients(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """For `GradScaler`: multiply all gradients by `inverse_scale` in host memory. Returns, on
        all ranks alike, 1 if any value on any rank is not finite, else 0."""
        if self._overlap is not None:
            self._overlap.refuse_scaled_gradients()
        home = self._sharded_home
        keys = self._keys_to_change()
        if any(home.gradients.dtype(key) is torch.float16 for key in keys):
            raise SwapUsageError(
                "fp16 gradients can't be unscaled: they would round to zero",
                fix="build the model in fp32; with fp16 enabled it computes in fp16 all the same",
            )
        found = torch.zeros(())
        home.gradients.unscale(keys, inverse_scale.to("cpu"), found)
        found = found.to(self.norm_device)
        if not home.is_alone:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        home.gradients_were_edited = True
        return found

    def _begin_step(
        self,
        swapper: PipelinedOptimizerSwapper,
        order: Callable[[list[SubGroup]], list[int]] | None = None,
    ) -> None:
        if self.expects_scaler and not self._sharded_home.gradients_were_edited:
            self.expects_scaler = False  # once is enough
            warnings.warn(
                "fp16 is enabled, but the loss was not scaled: small gradients are lost. Use "
                "nvmeswap.zero3.GradScaler.from_config(config)",
                stacklevel=4,
            )
        super()._begin_step(swapper, order)

    def _gradients_are_agreed_on(self) -> None:
        if self.gradient_clipping and not self._is_clipped:
            self.clip_grad_norm_(self.gradient_clipping)

    def _forget_step(self) -> None:
        home = self._sharded_home
        # A gradient that stays after the step stays clipped, as it would in memory.
        kept = {key: scale for key, scale in self._scales.items() if key in home.gradients}
        super()._forget_step()
        self._scales.update(kept)
        self._is_clipped = home.gradients_were_edited = home.is_overlapped = False

    @property
    def _sharded_home(self) -> ShardedHome:
        assert isinstance(self._home, ShardedHome)
        return self._home

    def _keys_to_change(self) -> list[str]:
        """Of the gradients there are; scales that wait for their use are applied."""
        home = self._sharded_home
        home.pending_scales = self._scales
        home.follow_the_user()
        keys = [key for key in self._by_key if home.gradients.get(key) is not None]
        for key in keys:
            home.apply_scale(key)
        return keys

    def _refuse_to_clip_twice(self) -> None:
        if self.step_is_unfinished:
            raise SwapUsageError(
                "a step is unfinished, and goes on with gradients as they were clipped for it",
                fix="call step() again first, without clipping",
            )

    def _refuse_tensor_parallel(self) -> None:
        """Norms are summed over the ranks that FSDP2 shards over, and not over others."""
        for key, parameter in self._by_key.items():
            assert isinstance(parameter, DTensor)
            if sum(not placement.is_replicate() for placement in parameter.placements) > 1:
                raise SwapUsageError(
                    f"{key} is sharded over two dimensions of a mesh: its norm would be of a part",
                    fix="use torch.nn.utils.get_total_norm and clip_grads_with_norm_, over the "
                    "gradients of one mesh at a time",
                )

    def _over_ranks(self, parts: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Norms of whole gradients from those of this rank's parts. (Where shards are replicated,
        on a 2-D mesh, each replica has all of them.)"""
        if math.isinf(norm_type):
            dist.all_reduce(parts, dist.ReduceOp.MAX, group=self.norm_group)
            return parts
        powers = parts.pow(norm_type)
        dist.all_reduce(powers, dist.ReduceOp.SUM, group=self.norm_group)
        return powers.pow(1.0 / norm_type)
