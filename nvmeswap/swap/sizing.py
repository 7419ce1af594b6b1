"""How much memory a swapped optimizer over resident parameters takes: from its settings and its
budget to sub-groups and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvmeswap.config import DEFAULT_SUB_GROUP_NUMEL, AioConfig, SwapBlock, check_folders
from nvmeswap.errors import SwapConfigError
from nvmeswap.memory.pool import SlotClass
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper, kept_count
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace, new_run_name
from nvmeswap.swap.sub_group import (
    SEGMENT_GRAIN_NUMEL,
    StateItem,
    SubGroupLayout,
    cut_into_sub_groups,
)

# Slots hold at least the smallest sub-group there can be, so that any group can be added later.
LEAST_SLOT_NBYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Sizing:
    """As the arguments of `SwappedOptimizer` say."""

    nvme_path: str | Path | Sequence[str | Path]
    sub_group_size: int | None
    buffer_count: int
    ratio: float
    pin_memory: bool
    update_thread_count: int

    def __post_init__(self) -> None:
        size = self.sub_group_size
        for name, value, right in (
            ("buffer_count", self.buffer_count, self.buffer_count >= 1),
            ("sub_group_size", size, size is None or size >= 1),
            ("ratio", self.ratio, 0 <= self.ratio <= 1),
            ("update_thread_count", self.update_thread_count, self.update_thread_count >= 1),
        ):
            if not right:
                raise SwapConfigError(
                    f"{name} is {value}",
                    key=name,
                    fix="counts and sizes are at least 1, ratio is from 0 to 1",
                )

    def sub_group_numel(self, items: Sequence[StateItem], budget_nbytes: int | None) -> int:
        """Elements of a sub-group: as told, or the usual, but so few that `buffer_count` of them
        fit the budget."""
        if self.sub_group_size is not None:
            return self.sub_group_size
        numel = DEFAULT_SUB_GROUP_NUMEL
        while budget_nbytes is not None and numel > SEGMENT_GRAIN_NUMEL:
            layouts = cut_into_sub_groups(items, numel)
            largest = max((layout.slot_nbytes for layout in layouts), default=0)
            if largest * min(self.buffer_count, len(layouts)) <= budget_nbytes:
                break
            numel //= 2
        return numel


def pool_request(
    layouts: Sequence[SubGroupLayout],
    *,
    buffer_count: int,
    ratio: float,
    budget_nbytes: int | None,
) -> PoolRequest:
    """Slots for what `ratio` keeps in memory and for the pipeline; where a budget is to be filled,
    for all. Without them, one for a group that may come later."""
    count = max(1, len(layouts))
    kept = kept_count(layouts, ratio)
    usual = min(count, kept + buffer_count)
    classes = PipelinedOptimizerSwapper.slot_classes(
        layouts, count if budget_nbytes is not None else usual
    )
    classes = [SlotClass(max(each.nbytes, LEAST_SLOT_NBYTES), each.count) for each in classes]
    return PoolRequest(
        classes or [SlotClass(LEAST_SLOT_NBYTES, buffer_count)],
        least_count=min(count, kept + 1),
        usual_count=usual,
    )


def open_space(
    sizing: Sizing, layouts: Sequence[SubGroupLayout], swap: SwapBlock, aio: AioConfig
) -> SwapSpace:
    """The space for these sub-groups, with one pool, "optimizer"."""
    folders = check_folders(sizing.nvme_path, key="nvme_path")
    return SwapSpace(
        Placement(folders, new_run_name()),
        {
            "optimizer": pool_request(
                layouts,
                buffer_count=sizing.buffer_count,
                ratio=sizing.ratio,
                budget_nbytes=swap.host_memory_nbytes,
            )
        },
        swap=swap,
        aio=aio,
        pin_memory=sizing.pin_memory,
    )
