"""Training from NVMe equals training in RAM, bit for bit, for each way to train."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

import nvmeswap.zero3
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case, build, run_in_ram, run_swapped


@functools.cache
def reference(bf16: bool, checkpointing: bool, accumulation: int, clip: bool) -> Run:
    return run_in_ram(
        Case(bf16=bf16, checkpointing=checkpointing, accumulation=accumulation, clip=clip)
    )


def assert_equals_ram(case: Case, nvme_path: Path) -> None:
    expected = reference(case.bf16, case.checkpointing, case.accumulation, case.clip)
    assert first_difference(run_swapped(case, nvme_path), expected) is None, case


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_run_with_everything_on_nvme_equals_ram(
    one_rank: None, tmp_path: Path, bf16: bool, checkpointing: bool, accumulation: int
) -> None:
    """Tied, frozen, reused and tiny parameters, evaluation between steps: no bit may differ.
    field cases D01, N01, N03, N04, O02, O06"""
    assert_equals_ram(
        Case(bf16=bf16, checkpointing=checkpointing, accumulation=accumulation), tmp_path
    )


@pytest.mark.parametrize("buffer_count", [1, 2, 3, 12])
@pytest.mark.parametrize("max_in_cpu", [0, 7000, 10**9])
def test_run_with_any_number_of_buffers_equals_ram(
    one_rank: None, tmp_path: Path, buffer_count: int, max_in_cpu: int
) -> None:
    """Peers stop at 5 buffers, in step 2.  field cases P01, P02, P03"""
    case = Case(buffer_count=buffer_count, max_in_cpu=max_in_cpu, bf16=True)
    assert_equals_ram(case, tmp_path)


@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_run_with_any_pair_of_devices_equals_ram(
    one_rank: None, tmp_path: Path, params: str, optimizer: str, bf16: bool
) -> None:
    """The two knobs are independent.  field case M06"""
    assert_equals_ram(Case(bf16=bf16, params=params, optimizer=optimizer), tmp_path)


def test_run_with_a_buffer_smaller_than_most_shards_equals_ram(
    one_rank: None, tmp_path: Path
) -> None:
    """A parameter larger than buffer_size is streamed.  field case P03"""
    case = Case()
    config = case.config(tmp_path)
    zero = config["zero_optimization"]
    zero["offload_param"]["buffer_size"] = 1024
    assert_equals_ram(replace(case, extra={"zero_optimization": zero}), tmp_path)


def test_run_that_clips_by_the_global_norm_equals_ram(one_rank: None, tmp_path: Path) -> None:
    """torch's own clip sees no gradient here; ours must give the same norm and the same update.
    field case O01"""
    assert_equals_ram(Case(clip=True, accumulation=4), tmp_path)


def test_recomputed_outputs_are_those_of_the_first_forward(one_rank: None, tmp_path: Path) -> None:
    """torch compares their shapes only.  field case D08"""
    case = Case(checkpointing=True, bf16=True, buffer_count=1, dim=16)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    outputs: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    for block, seen in zip(model.blocks, outputs, strict=True):
        block.register_forward_hook(lambda _, __, made, seen=seen: seen.append(made.detach()))
    for _ in range(2):
        with set_checkpoint_early_stop(False):
            model(torch.arange(12).view(2, 6)).float().square().mean().backward()
        assert [len(seen) for seen in outputs] == [4, 2, 2, 2]  # the first one is used twice
        for seen in outputs:
            assert all(map(torch.equal, seen, reversed(seen)))
            seen.clear()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
