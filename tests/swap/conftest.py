"""Optimizer and parameter swappers on real folders, over an engine that can be told to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.io.engine import Engine
from nvmeswap.io.probe import probe_folder
from nvmeswap.memory.pool import Pool, SlotClass
from nvmeswap.store.store import Store
from nvmeswap.swap.home import ResidentHome
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.swapped import SwappedOptimizer

POISON = 0xA5


@dataclass
class Bench:
    """Makes swappers on one folder; `engine.inject` makes it fail from then on."""

    nvme_path: Path
    timeout_s: float = 20.0
    engine: Engine = field(init=False)
    store: Store = field(init=False)
    pools: list[Pool] = field(default_factory=list)

    def __post_init__(self) -> None:
        probe = probe_folder(self.nvme_path)
        self.engine = Engine(backend=probe.backend, fault_script="read 1000000 errno 5")
        self.store = Store(
            self.nvme_path, run="test", rank=0, world_size=1, engine=self.engine, probe=probe,
            timeout_s=self.timeout_s,
        )

    def pool(self, classes: Sequence[SlotClass]) -> Pool | None:
        """A pool over poisoned memory, None for no slots."""
        nbytes = Pool.nbytes_needed(classes)
        if not nbytes:
            return None
        whole = torch.full((nbytes + 4096,), POISON, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        pool = Pool(whole[start : start + nbytes], classes, name="test")
        self.pools.append(pool)
        return pool

    def adamw(
        self,
        params: Iterable[Any],
        *,
        sub_group_size: int = 4096,
        buffer_count: int = 3,
        **options: Any,
    ) -> SwappedOptimizer:
        """AdamW over this bench's engine."""
        return self.optimizer(
            torch.optim.AdamW, params, sub_group_size=sub_group_size, buffer_count=buffer_count,
            **options,
        )

    def optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        sub_group_size: int = 4096,
        buffer_count: int = 3,
        slot_count: int | None = None,
        **options: Any,
    ) -> SwappedOptimizer:
        """Any SwappedOptimizer; `slot_count` above `buffer_count` keeps sub-groups in memory."""
        optimizer = SwappedOptimizer.over(optimizer_class, params, ResidentHome(), **options)
        layouts = optimizer.lay_out(sub_group_size)
        wanted = slot_count or buffer_count
        pool = self.pool(PipelinedOptimizerSwapper.slot_classes(layouts, wanted))
        optimizer.attach(
            PipelinedOptimizerSwapper(
                layouts, store=self.store, pool=pool, timeout_s=self.timeout_s,
                buffer_count=buffer_count,
            )
        )
        return optimizer

    def params(
        self, specs: Sequence[ShardSpec], *, on_nvme: bool = True, min_swap_nbytes: int = 0,
        buffer_count: int = 3, largest_slot_numel: int = 1 << 40, max_in_cpu: int = 0,
    ) -> PartitionedParamSwapper:
        """A parameter swapper over this bench's engine."""
        placement = ParamPlacement(
            on_nvme, min_swap_nbytes, buffer_count, largest_slot_numel, max_in_cpu
        )
        pool = self.pool(placement.slot_classes(specs))
        return PartitionedParamSwapper(
            specs, placement, store=self.store, pool=pool, timeout_s=self.timeout_s
        )

    def close(self) -> None:
        self.engine.inject("read 1000000 errno 5")
        self.store.close()
        self.engine.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def parameters() -> Callable[..., list[torch.nn.Parameter]]:
    """Parameters of given sizes and dtype, the same for the same seed."""

    def make(
        sizes: Sequence[int], *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes
        ]

    return make


Make = Callable[..., SwappedOptimizer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Optimizers over a folder, closed in the end."""
    made: list[SwappedOptimizer] = []

    def build(params: Any, kind: Any = torch.optim.AdamW, **options: Any) -> SwappedOptimizer:
        options = {"nvme_path": tmp_path, "pin_memory": False, **options}
        made.append(SwappedOptimizer(kind, params, **options))
        return made[-1]

    yield build
    for optimizer in made:
        optimizer.close()


def set_gradients(params: Iterable[torch.Tensor], step: int) -> None:
    """Gradients that depend on the step and on nothing else."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
