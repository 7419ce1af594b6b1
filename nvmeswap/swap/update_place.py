"""Where an optimizer's updates are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.mirror import MirroredUpdater
from nvmeswap.swap.update import CachedUpdater, Updater


@dataclass(frozen=True, slots=True)
class UpdatePlace:
    """On `device`, in a mirror of each slot; or, if not `is_mirrored`, on the CPU by pieces that
    fit its cache. (A mirror on the CPU is of no use but to try what a GPU does.)"""

    device: torch.device
    is_mirrored: bool

    @classmethod
    def of(cls, told: str | torch.device | UpdatePlace) -> UpdatePlace:
        """From "cpu", "cuda" (the current one) or a device. Raises SwapConfigError for another
        kind, SwapUsageError where there is no CUDA."""
        if isinstance(told, UpdatePlace):
            return told
        kind, _, number = str(told).partition(":")
        if kind not in ("cpu", "cuda") or not (number.isdecimal() or not number):
            raise SwapConfigError(
                f"updates can't be computed on {told}",
                key="update_device",
                fix='use "cpu" or "cuda"',
            )
        if kind == "cpu":
            return cls(torch.device("cpu"), is_mirrored=False)
        if not torch.cuda.is_available():
            raise SwapUsageError(
                'update_device is "cuda", and torch finds no CUDA device here',
                cause="there is no GPU, its driver does not answer, or torch is built without CUDA",
                fix='use update_device="cpu", or a machine and a torch with CUDA',
            )
        index = int(number) if number else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise SwapConfigError(
                f"there is no {told}",
                key="update_device",
                fix=f"there are {torch.cuda.device_count()} GPUs, counted from 0",
            )
        return cls(torch.device("cuda", index), is_mirrored=True)

    def updater(self, rule: ElementwiseOptimizer) -> Updater:
        """Makes the rule's updates there."""
        return MirroredUpdater(rule, self.device) if self.is_mirrored else CachedUpdater(rule)
