"""Which shards stay on the device, and what lies on which tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvmeswap.config import SwapBlock
from nvmeswap.stats import PlacementStats, TierStats
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.traffic import SubGroup
from nvmeswap.zero3.entries import Entry


def keep_resident(entries: Sequence[Entry], settings: SwapBlock, device: torch.device) -> None:
    """Take those out of the swap that fit the budget of device memory, in their order; and where
    the model computes on a GPU, all that are too small for it.

    All with FSDP2's padding, which is the same on all ranks: so is the choice.
    """
    left_nbytes = settings.keep_resident_bytes
    least_nbytes = 0 if device.type == "cpu" else settings.min_swap_nbytes
    for entry in entries:
        numel = entry.padded_shape.numel()
        nbytes = numel * entry.parameter.dtype.itemsize
        is_small = numel * entry.store_dtype.itemsize < least_nbytes
        if entry.swapped and (is_small or nbytes <= left_nbytes):
            entry.swapped = False
            entry.store_dtype = entry.parameter.dtype
            left_nbytes -= 0 if is_small else nbytes


def placement_of(
    entries: Sequence[Entry],
    params: PartitionedParamSwapper | None,
    optimizer: PipelinedOptimizerSwapper,
    gradients_nbytes: int,
) -> PlacementStats:
    """What lies where, each byte counted once, at its home, and without padding."""
    resident_nbytes = sum(
        entry.numel * entry.parameter.dtype.itemsize for entry in entries if not entry.swapped
    )
    swapped = None if params is None else params.stats()
    groups = optimizer.groups_of({entry.key for entry in entries})
    return PlacementStats(
        device=TierStats(parameter_nbytes=resident_nbytes, state_nbytes=0, gradient_nbytes=0),
        host=TierStats(
            parameter_nbytes=0 if swapped is None else swapped.ram_nbytes,
            state_nbytes=sum(_state_nbytes(group) for group in groups if group.in_ram),
            gradient_nbytes=gradients_nbytes,
        ),
        nvme=TierStats(
            parameter_nbytes=0 if swapped is None else swapped.nvme_nbytes,
            state_nbytes=sum(_state_nbytes(group) for group in groups if not group.in_ram),
            gradient_nbytes=0,
        ),
    )


def _state_nbytes(group: SubGroup) -> int:
    return sum(
        item.master.nbytes(segment.numel)
        + segment.numel * item.state_dtype.itemsize * len(item.states)
        for segment in group.layout.segments
        for item in [segment.item]
    )
