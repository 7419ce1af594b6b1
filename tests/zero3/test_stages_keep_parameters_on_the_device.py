"""Stages 1 and 2: optimizer state is offloaded, parameters stay on the device."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import nvmeswap.zero3
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case, build, run_in_ram, run_swapped
from tests.zero3.ranks import run_ranks


def at_stage(stage: int, optimizer: str, nvme_path: Path, **how: bool) -> Case:
    case = Case(optimizer=optimizer, params="none", steps=3, **how)
    zero = copy.deepcopy(case.config(nvme_path)["zero_optimization"])
    del zero["offload_param"]
    return replace(case, extra={"zero_optimization": {**zero, "stage": stage}})


@functools.cache
def reference(bf16: bool) -> Run:
    return run_in_ram(Case(bf16=bf16, steps=3))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_run_at_a_lower_stage_equals_ram(
    one_rank: None, tmp_path: Path, stage: int, optimizer: str, bf16: bool
) -> None:
    """Users of offload_optimizer alone have these stages; elsewhere they train, too."""
    case = at_stage(stage, optimizer, tmp_path, bf16=bf16)
    assert first_difference(run_swapped(case, tmp_path), reference(bf16)) is None


def test_runs_of_two_ranks_at_a_lower_stage_equal_ram(tmp_path: Path) -> None:
    """One launch for both stages, both devices and both precisions; and for budgets of device
    memory: shards differ in size between ranks, what is swapped must not."""
    keeps = {"nvmeswap": {"keep_resident_bytes": 25_000, "min_swap_nbytes": 1000}}
    cases = [
        at_stage(1, "cpu", tmp_path / "nvme"),
        at_stage(1, "nvme", tmp_path / "nvme", bf16=True),
        at_stage(2, "cpu", tmp_path / "nvme", bf16=True),
        at_stage(2, "nvme", tmp_path / "nvme", clip=True),
        Case(steps=3, extra=keeps, bf16=True),
        Case(steps=3, extra=keeps, params="cpu"),
    ]
    run_ranks(2, "equals_ram", tmp_path, cases=cases)


@pytest.mark.parametrize(("stage", "stays"), [(2, True), (3, False)])
def test_gathered_parameters_stay_until_backward_is_over(
    one_rank: None, tmp_path: Path, stage: int, stays: bool
) -> None:
    """Else each would be gathered twice, which is stage 3's price for less memory."""
    case = Case(params="none")
    zero = {**case.config(tmp_path)["zero_optimization"], "stage": stage}
    config = replace(case, extra={"zero_optimization": zero}).config(tmp_path)
    model, optimizer = nvmeswap.zero3.shard(build(case), config)
    loss = model(torch.zeros(2, 3, dtype=torch.long)).sum()
    assert [isinstance(p, DTensor) for p in model.blocks[1].parameters()] == [not stays] * 7
    loss.backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer.close()
