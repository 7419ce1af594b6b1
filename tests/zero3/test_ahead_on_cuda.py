"""Copies that are made ahead, in the order of the streams. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.zero3.ahead import DeviceAhead
from tests.zero3.test_ahead_is_never_stale import KEYS, NUMEL, swapper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SLEEP_CYCLES = 10_000_000  # about 5 ms
STEPS = 4


@pytest.fixture
def params() -> Iterator[PartitionedParamSwapper]:
    with swapper() as made:
        yield made


@pytest.mark.parametrize("is_slow", ["the kernel", "the copy"])
def test_slow_kernels_and_slow_copies_mix_no_shards_and_nobody_waits(
    params: PartitionedParamSwapper, is_slow: str
) -> None:
    """Else a copy lands in memory that is still read, or a kernel reads what has not come."""
    ahead = DeviceAhead(params, torch.device("cuda"), 2 * 4 * NUMEL)
    seen: list[list[torch.Tensor]] = []
    torch.cuda.synchronize()
    for step in range(STEPS):
        for number, key in enumerate(KEYS):
            params.write(key, torch.full((NUMEL,), float(10 * step + number)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            ahead.look_ahead()
            seen.append([_use(params, ahead, key, is_slow) for key in KEYS])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        params.end_step()
    torch.cuda.synchronize()
    for step, values in enumerate(seen):
        for number, used in enumerate(values):
            assert used.unique().tolist() == [10.0 * step + number]


def _use(
    params: PartitionedParamSwapper, ahead: DeviceAhead, key: str, is_slow: str
) -> torch.Tensor:
    values = ahead.take(key)
    if values is None:
        values = torch.full((NUMEL,), torch.nan, device="cuda")
        params.fetch(key, values)
    if is_slow == "the copy":  # which waits for what was queued before it
        torch.cuda._sleep(SLEEP_CYCLES)
    ahead.look_ahead()
    if is_slow == "the kernel":
        torch.cuda._sleep(SLEEP_CYCLES)
    return values * 1


def test_values_used_on_another_stream_are_not_overwritten(
    params: PartitionedParamSwapper,
) -> None:
    """`shard()` was called on one stream, and the model is trained on another."""
    ahead = DeviceAhead(params, torch.device("cuda"), 2 * 4 * NUMEL)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(STEPS):
        ahead.look_ahead()
        with torch.cuda.stream(other):
            values = ahead.take(KEYS[0])
            assert values is not None
            torch.cuda._sleep(SLEEP_CYCLES)
            used = values * 1
            del values
        poison = [torch.full((NUMEL,), torch.nan, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert used.unique().tolist() == [0.0] and len(poison) == 8
        for key in KEYS[1:]:
            params.fetch(key, torch.empty(NUMEL))
        params.end_step()
    ahead.close()
