"""Parameters and states beside a GPU: what is copied is not overwritten, waited for, or doubled
there. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap.memory.arena import Arena
from nvmeswap.memory.pool import Pool
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from tests.swap.conftest import Bench
from tests.swap.test_optimizer_field_cases import run, swapped_over
from tests.swap.test_reads_are_those_needed import fill
from tests.swap.twins import ADAMW, BF16, FP32, Twins, parameters_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def twins_on_gpu(folder: Path, **options: Any) -> Twins:
    params = [
        nn.Parameter(parameter.detach().cuda())
        for parameter in parameters_of([(37,), (90_000,), (5000,)], [FP32, BF16, torch.float16])
    ]
    return Twins(ADAMW, params, lambda groups: swapped_over(groups, folder, **options))


# field cases D05, O05
def test_gpu_that_is_behind_gets_the_values_of_each_step(tmp_path: Path) -> None:
    """A page-locked slot must not be written again before its copy is over, and what is queued
    after step() must see the new values."""
    twins = twins_on_gpu(tmp_path, buffer_count=1, pin_memory=True)
    for step in range(4):
        twins.backward(step)
        twins.step_plain()
        torch.cuda._sleep(50_000_000)
        twins.swapped.step()
        seen = [parameter.detach() * 1 for parameter in twins.params]
        for value, master in zip(seen, twins.masters, strict=True):
            assert torch.equal(value.cpu(), master.to(value.dtype))
        twins.swapped.zero_grad()
    twins.assert_same()
    twins.swapped.close()


# field case F06
def test_state_is_loaded_without_memory_of_the_gpu(tmp_path: Path) -> None:
    """It goes from file to file; three times the model would not fit there."""
    (tmp_path / "swap").mkdir()
    twins = twins_on_gpu(tmp_path / "swap")
    run(twins, range(2))
    twins.swapped.save(tmp_path / "state")
    before_nbytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    twins.swapped.load(tmp_path / "state")
    largest_nbytes = max(parameter.nbytes for parameter in twins.params)
    assert torch.cuda.max_memory_allocated() <= before_nbytes + largest_nbytes
    run(twins, range(2, 4))
    twins.assert_same()
    twins.swapped.close()


def test_copy_to_the_device_is_queued_and_not_waited_for(bench: Bench) -> None:
    """A blocking copy leaves host and device idle in turn, though memory is pinned.

    field case L01
    """
    specs = [ShardSpec(f"layer{index}", 8 << 20, torch.bfloat16) for index in range(4)]
    placement = ParamPlacement(True, 0, 2, 1 << 40, 0)
    classes = placement.slot_classes(specs)
    arena = Arena(Pool.nbytes_needed(classes))
    assert arena.memory.is_pinned()
    pool = Pool(arena.memory, classes, name="pinned")
    swapper = PartitionedParamSwapper(specs, placement, store=bench.store, pool=pool, timeout_s=20)
    fill(swapper, specs)
    outs = [torch.full((spec.numel,), -7, dtype=spec.dtype, device="cuda") for spec in specs]
    torch.cuda.synchronize()
    torch.cuda._sleep(10**10)  # seconds of work, behind which the copy has to wait
    swapper.fetch(specs[0].key, outs[0])
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    for index in range(4):
        swapper.fetch(specs[index].key, outs[index])
    torch.cuda.synchronize()
    assert all(bool((out == index).all()) for index, out in enumerate(outs))
    arena.close()
