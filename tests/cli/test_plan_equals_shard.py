"""What a plan says of bytes is what `shard()` then takes, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nvmeswap.zero3
from nvmeswap.cli.plan.passes import Compute, play
from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.cli.plan.stepping import step
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
    return Foresight(model, settings, ranks=ranks, device=case.device).footprint(settings)


@pytest.mark.parametrize("bf16", [False, True])
def test_plan_for_updates_on_a_gpu_has_the_layout_of_updates_in_place(
    tmp_path: Path, bf16: bool
) -> None:
    """A shard that stays there is its own master, as on the CPU; else it has one beside it."""
    on_cpu = foreseen(Case(bf16=bf16, params="none"), tmp_path)
    there = {"nvmeswap": {"min_swap_nbytes": 1000, "update_device": "cuda"}}
    case = Case(bf16=bf16, params="none", device="cuda")
    assert foreseen(replace(case, extra=there), tmp_path).layouts == on_cpu.layouts
    beside = foreseen(case, tmp_path)
    assert beside.optimizer_file_nbytes > on_cpu.optimizer_file_nbytes


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


@pytest.mark.parametrize("dtype", [
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int64, torch.float64,
], ids=str)
def test_plan_and_shard_know_the_same_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """A frozen base of any of them, beside something to train."""
    # field case E02
    def made(device: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        base = torch.zeros(64, 64, dtype=dtype)
        model[0].weight = nn.Parameter(base, requires_grad=False)
        return model.to(device)

    raw = Case().config(tmp_path)
    settings = Config.load(raw)
    plan = Foresight(made("meta"), settings, ranks=1, device="cpu").footprint(settings)
    _, optimizer = nvmeswap.zero3.shard(made("cpu"), raw)
    stats: Any = optimizer.swap.stats()
    assert plan.params_file_nbytes + plan.optimizer_file_nbytes == stats.store.allocated_nbytes
    assert plan.arena_nbytes == stats.arena_nbytes
    optimizer.swap.close()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("max_in_cpu,ratio", [(0, 1.0), (300_000, 1.0), (10**9, 0.5)])
def test_plan_and_steps_agree_on_the_bytes_that_are_moved(
    tmp_path: Path, bf16: bool, max_in_cpu: int, ratio: float
) -> None:
    case = Case(bf16=bf16, max_in_cpu=max_in_cpu)
    raw = case.config(tmp_path)
    raw["zero_optimization"]["sub_group_size"] = 32_768
    raw["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    settings = Config.load(raw)
    with torch.device("meta"):
        made = Stack()
    plan = Foresight(made, settings, ranks=1, device="cpu").footprint(settings)
    drives, host = DriveRates(1e9, 1e9, 1e9), HostRates(1e9, 1e10)
    passes = play(plan, drives, host, Compute(0.1, 0.1), micro_batches=1, checksums=True)
    stepping = step(plan, drives, host, checksums=True, cached=passes.cached)

    model, optimizer = nvmeswap.zero3.shard(Stack(), raw)
    moved = []
    for _ in range(5):
        model(torch.randn(2, 256)).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine = optimizer.swap.stats().engine
        moved.append((engine.read_direct_nbytes + engine.read_buffered_nbytes,
                      engine.write_direct_nbytes + engine.write_buffered_nbytes))
    optimizer.swap.close()
    read, written = ((moved[-1][way] - moved[2][way]) / 2 for way in (0, 1))
    foreseen = passes.forward_read_nbytes + passes.backward_read_nbytes + stepping.read_nbytes
    assert foreseen == pytest.approx(read, rel=0.03, abs=1)
    assert stepping.write_nbytes == pytest.approx(written, rel=0.03)
