"""What a plan says of bytes is what `shard()` then takes, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import nvmeswap.zero3
from nvmeswap.config import Config
from nvmeswap.zero3.foresight import Footprint, Foresight
from tests.zero3.cases import AwkwardModel, Case, build


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A plan pretends a group of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield


def foreseen(case: Case, folder: Path, ranks: int = 1) -> Footprint:
    settings = Config.load(case.config(folder))
    with torch.device("meta"):
        model = AwkwardModel(dim=case.dim)
    return Foresight(model, settings, ranks=ranks, device="cpu").footprint(settings)


CASES = [
    Case(),
    Case(bf16=True),
    Case(bf16=True, max_in_cpu=1 << 20),
    Case(params="cpu"),
    Case(params="none"),
    Case(optimizer="cpu"),
    Case(params="none", bf16=True, buffer_count=1),
    Case(dim=64, buffer_count=2, max_in_cpu=20_000),
    Case(dim=64, extra={"nvmeswap": {"host_memory_nbytes": 600_000, "min_swap_nbytes": 100}}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_and_shard_agree_on_every_byte(case: Case, tmp_path: Path) -> None:
    # field cases B01, P04
    plan = foreseen(case, tmp_path)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    stats: Any = optimizer.swap.stats()
    assert plan.arena_nbytes == stats.arena_nbytes
    allocated = 0 if stats.store is None else stats.store.allocated_nbytes
    assert plan.params_file_nbytes + plan.optimizer_file_nbytes == allocated
    assert len(plan.layouts) == stats.optimizer.sub_group_count
    assert len(plan.layouts) - len(plan.swapped) == stats.optimizer.in_ram_count
    if stats.params is not None and case.params == "nvme":
        assert plan.kept_nbytes == stats.params.ram_nbytes
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert plan.gradient_nbytes == optimizer.swap.stats().optimizer.gradient_nbytes
    optimizer.swap.close()
