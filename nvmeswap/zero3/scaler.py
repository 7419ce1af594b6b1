"""Loss scaling for fp16: torch.amp.GradScaler for gradients that lie in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from nvmeswap.config import Config
from nvmeswap.errors import SwapOverflowError
from nvmeswap.zero3.optimizer import ShardedOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, used in the same way, for the optimizer that `shard()` returns.

        scaler = nvmeswap.zero3.GradScaler.from_config("ds_config.json")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)        # only if the gradients are looked at or clipped
        scaler.step(optimizer)
        scaler.update()

    A step is skipped on all ranks if any gradient on any rank is infinite or not a number. Other
    optimizers are treated as by torch's class.

    Args: as torch's (`device` None: a GPU if there is one). Beyond them DeepSpeed's: `hysteresis`,
    the overflow at which the scale is lowered (those before it only skip their step), counted anew
    when the scale grows, or after each good step (`consecutive_hysteresis`); `min_scale`, below
    which it is never lowered. The defaults are torch's behaviour.
    Raises: SwapOverflowError in `update` for an overflow at `min_scale`, on all ranks.
    Blocking: `unscale_` passes once over the gradients. Threads: the training loop's.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        min_scale: float = 0.0,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._hysteresis = self._hysteresis_left = hysteresis
        self._consecutive_hysteresis = consecutive_hysteresis
        self._min_scale = min_scale

    @classmethod
    def from_config(
        cls, config: Config | Mapping[str, Any] | str | Path, device: str | None = None
    ) -> GradScaler:
        """As the block `fp16` of a configuration says; one that does nothing where fp16 is not
        enabled. Raises SwapConfigError."""
        fp16 = (config if isinstance(config, Config) else Config.load(config)).fp16
        is_static = fp16.loss_scale > 0
        scaler = cls(
            device,
            init_scale=fp16.loss_scale if is_static else 2.0**fp16.initial_scale_power,
            growth_interval=fp16.loss_scale_window,
            enabled=fp16.enabled,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=0.0 if is_static else fp16.min_loss_scale,
        )
        if is_static:
            scaler.set_growth_factor(1.0)
            scaler.set_backoff_factor(1.0)
        return scaler

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = optimizer.unscale_gradients(inv_scale)
        return {found_inf.device: found.to(found_inf.device)}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's; waits for the device."""
        if not self.is_enabled() or new_scale is not None:
            super().update(new_scale)
            return
        scale, overflowed = self.get_scale(), self._overflowed()
        is_last = overflowed and self._hysteresis_left == 1
        backoff_factor = self.get_backoff_factor()
        if not is_last or scale <= self._min_scale:
            self.set_backoff_factor(1.0)
        try:
            super().update()
        finally:
            self.set_backoff_factor(backoff_factor)
        assert self._scale is not None
        self._scale.clamp_(min=min(scale, self._min_scale))
        if overflowed:
            self._hysteresis_left = max(1, self._hysteresis_left - 1)
        elif self._consecutive_hysteresis or self.get_scale() > scale:
            self._hysteresis_left = self._hysteresis
        if is_last and scale <= self._min_scale:
            raise SwapOverflowError(
                f"gradients overflow at a loss scale of {scale}, which is the least allowed",
                intact="parameters and optimizer state: the step was skipped",
                fix="train in bf16, lower the learning rate, or lower fp16.min_loss_scale",
            )

    def _overflowed(self) -> bool:
        return any(
            bool(found)
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and how many overflows are still free."""
        state = super().state_dict()
        return {**state, "hysteresis_left": self._hysteresis_left} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; takes a state of torch's class, too."""
        super().load_state_dict(state_dict)
        self._hysteresis_left = state_dict.get("hysteresis_left", self._hysteresis)
