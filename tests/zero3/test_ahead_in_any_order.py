"""Copies ahead while the GPU works as late as it can, or as early. (test_ahead_on_cuda.py: a real
one.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.swap import shard
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.zero3 import ahead as under_test
from nvmeswap.zero3.ahead import DeviceAhead
from tests.zero3.late_streams import Gpu, Late
from tests.zero3.test_ahead_is_never_stale import KEYS, NUMEL, swapper

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@settings(max_examples=40, deadline=None)
@given(
    eager=st.booleans(), budget=st.integers(1, 4), others=st.booleans(),
    early=st.booleans(), skipped=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    work=st.lists(st.integers(0, 6), min_size=18, max_size=18),
)
def test_each_use_reads_its_own_values(
    patch: pytest.MonkeyPatch, eager: bool, budget: int, others: bool, early: bool,
    skipped: list[int], work: list[int],
) -> None:
    """Of this step, whatever other memory is taken and freed meanwhile, and whatever was copied
    before the pass, or for uses that do not come.  field cases D02, D05"""
    gpu = Gpu(eager=eager)
    patch.setattr(under_test, "torch", gpu)
    patch.setattr(shard, "torch", gpu)
    seen: list[torch.Tensor] = []
    noise: list[torch.Tensor] = []
    with swapper() as params:
        ahead = DeviceAhead(params, CUDA, budget * 4 * NUMEL)
        for step in range(3):
            for number, key in enumerate(KEYS):
                params.write(key, torch.full((NUMEL,), float(10 * step + number)))
            if early:
                ahead.look_ahead()
            for number, key in enumerate(KEYS):
                if number < skipped[step]:
                    continue
                _use(gpu, params, ahead, key, seen)
                if others:
                    gpu.read(gpu.empty(NUMEL, dtype=torch.float32, device=CUDA), noise)
                gpu.work(work[6 * step + number])
            params.end_step()
        ahead.close()
        gpu.compute.finish()
        for stream in gpu.side_streams:
            stream.finish()
    assert [each.unique().tolist() for each in seen] == [
        [10.0 * step + number] for step in range(3) for number in range(skipped[step], len(KEYS))
    ]
    assert all(bool(each.isnan().all()) for each in noise)


def _use(
    gpu: Gpu, params: PartitionedParamSwapper, ahead: DeviceAhead, key: str,
    seen: list[torch.Tensor],
) -> None:
    values = ahead.take(key)
    if values is None:
        values = gpu.empty(NUMEL, dtype=torch.float32, device=CUDA)
        params.fetch(key, values)
    ahead.look_ahead()
    assert isinstance(values, Late)
    gpu.read(values, seen)
