"""Device memory is used before host memory, and that before the drive."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from nvmeswap.stats import PlacementStats, TierStats
from nvmeswap.zero3.tensor import SwappedTensor
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case, build, run_in_ram, run_swapped

ALL_NBYTES = sum(p.nbytes for p in build(Case()).parameters())


def keeping(nbytes: int, **how: bool | str) -> Case:
    settings = {"keep_resident_bytes": nbytes, "min_swap_nbytes": 1000}
    return Case(steps=2, buffer_count=1, extra={"nvmeswap": settings}, **how)


@functools.cache
def reference(bf16: bool) -> Run:
    return run_in_ram(Case(bf16=bf16, steps=2))


@pytest.mark.parametrize(
    ("budget", "bf16"),
    [(0, True), (ALL_NBYTES // 2, False), (ALL_NBYTES // 2, True), (ALL_NBYTES, True)],
)
def test_run_with_any_budget_of_device_memory_equals_ram(
    one_rank: None, tmp_path: Path, budget: int, bf16: bool
) -> None:
    """Swapped and resident parameters in one model, one group and one sub-group."""
    case = keeping(budget, bf16=bf16)
    assert first_difference(run_swapped(case, tmp_path), reference(bf16)) is None


def test_first_parameters_that_fit_stay(one_rank: None, tmp_path: Path) -> None:
    """In order, so that a user can tell which from the model alone."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    config = Case(extra={"nvmeswap": {"keep_resident_bytes": 2 * 64 * 64 * 4}}).config(tmp_path)
    model, optimizer = nvmeswap.zero3.shard(model, config)
    swapped = [isinstance(p.to_local(), SwappedTensor) for p in model.parameters()]
    assert swapped == [False, False, True, True]
    optimizer.close()


def tiers(stats: PlacementStats) -> dict[str, TierStats]:
    return {"device": stats.device, "host": stats.host, "nvme": stats.nvme}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_placement_says_where_each_byte_is(one_rank: None, tmp_path: Path, device: str) -> None:
    """Elsewhere "all on NVMe" left most of it in memory.  field case B09"""
    layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(4)]
    numel = 128 * 128  # of each
    config = Case(params=device, optimizer=device).config(tmp_path)
    config["nvmeswap"] = {"keep_resident_bytes": numel * 4, "min_swap_nbytes": 0}
    model, optimizer = nvmeswap.zero3.shard(torch.nn.Sequential(*layers), config)
    placed = tiers(optimizer.swap.stats().placement)
    masters_nbytes = 3 * numel * 4  # the resident one is its own master
    moments_nbytes = 4 * numel * 2 * 4
    assert placed["device"] == TierStats(numel * 4, 0, 0)
    there, other = ("host", "nvme") if device == "cpu" else ("nvme", "host")
    assert placed[there] == TierStats(3 * numel * 4, masters_nbytes + moments_nbytes, 0)
    assert placed[other] == TierStats(0, 0, 0)
    model(torch.ones(2, 128)).sum().backward()
    placed = tiers(optimizer.swap.stats().placement)
    assert placed["host"].gradient_nbytes == 4 * numel * 4
    optimizer.step()
    optimizer.zero_grad()
    placed = tiers(optimizer.swap.stats().placement)
    assert placed["host"].gradient_nbytes == 0
    optimizer.close()


def test_sub_groups_that_stay_count_as_host_memory(one_rank: None, tmp_path: Path) -> None:
    """`ratio` decides; the sum is the same.  field case B09"""
    sums = set()
    for ratio in (0.0, 0.5, 1.0):
        case = Case()
        zero = case.config(tmp_path)["zero_optimization"]
        zero["offload_optimizer"]["ratio"] = ratio
        config = replace(case, extra={"zero_optimization": zero}).config(tmp_path)
        _, optimizer = nvmeswap.zero3.shard(build(case), config)
        placed = optimizer.swap.stats().placement
        assert (placed.host.state_nbytes > 0) == (ratio < 1)
        assert (placed.nvme.state_nbytes > 0) == (ratio > 0)
        sums.add(placed.host.state_nbytes + placed.nvme.state_nbytes)
        optimizer.close()
    assert len(sums) == 1


def test_max_in_cpu_in_bytes_keeps_as_much(one_rank: None, tmp_path: Path) -> None:
    """A budget is known in bytes; DeepSpeed counts elements."""
    cached = []
    for amount in (40_000, "80000B"):  # of bf16
        case = Case(bf16=True, buffer_count=1)
        zero = case.config(tmp_path)["zero_optimization"]
        zero["offload_param"]["max_in_cpu"] = amount
        config = replace(case, extra={"zero_optimization": zero}).config(tmp_path)
        model, optimizer = nvmeswap.zero3.shard(build(case), config)
        for _ in range(2):
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        cached.append(optimizer.swap.stats().params.cached_nbytes)
        optimizer.close()
    assert cached[0] == cached[1] > 40_000


def test_run_without_page_locking_locks_nothing(one_rank: None, tmp_path: Path) -> None:
    """Elsewhere it was locked all the same.  field case B04"""
    for locks in (True, False):
        case = Case()
        zero = case.config(tmp_path)["zero_optimization"]
        zero["offload_param"]["pin_memory"] = locks  # one block that says no is enough
        config = replace(case, extra={"zero_optimization": zero}).config(tmp_path)
        _, optimizer = nvmeswap.zero3.shard(build(case), config)
        assert (optimizer.swap.stats().locked_nbytes > 0) == locks
        optimizer.close()


def test_model_that_is_sharded_is_refused_though_nothing_is_swapped(
    one_rank: None, tmp_path: Path
) -> None:
    """Else two optimizers have states of the same parameters."""
    settings = Case(extra={"nvmeswap": {"keep_resident_bytes": 1 << 30}}).config(tmp_path)
    model, optimizer = nvmeswap.zero3.shard(torch.nn.Linear(8, 8), settings)
    try:
        with pytest.raises(SwapUsageError, match="already"):
            nvmeswap.zero3.shard(model, settings)
    finally:
        optimizer.close()
