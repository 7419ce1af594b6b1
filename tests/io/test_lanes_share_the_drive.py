"""Demand goes first, the others always get on, and neighbours on the drive go in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io import Engine, Lane

MakeBytes = Callable[..., torch.Tensor]
KiB = 1 << 10
BACKENDS = ("uring", "aio")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lane", (Lane.PREFETCH, Lane.WRITEBACK))
def test_demand_behind_background_that_hangs_is_served(
    swap_path: Path, backend: str, lane: Lane
) -> None:
    """Else a read that the model waits for stands behind all that could have waited."""
    with Engine(backend=backend, fault_script="", block_nbytes=16 * KiB, queue_depth=8,
                background_nbytes=64 * KiB) as engine:
        file = engine.open(swap_path)
        wanted = torch.empty(1024)
        engine.read(file, 0, wanted).wait()
        engine.inject("write * never")
        before = engine.stats().block_count
        hanging = engine.write(file, 0, torch.zeros(1 << 20, dtype=torch.uint8), lane=lane)
        for _ in range(3):
            engine.read(file, 2 << 20, wanted).wait()
        # 64 KiB in flight, and the three demands: half of the queue is free.
        assert engine.stats().block_count - before <= 4 + 3
        assert not hanging.done()
        engine.inject("")
        hanging.wait()


@pytest.mark.parametrize(
    ("first", "second"),
    ((Lane.PREFETCH, Lane.WRITEBACK), (Lane.WRITEBACK, Lane.PREFETCH),
     (Lane.DEMAND, Lane.WRITEBACK), (Lane.DEMAND, Lane.PREFETCH)),
)
def test_lane_behind_a_long_queue_of_another_gets_on(
    swap_path: Path, first: Lane, second: Lane
) -> None:
    """Else slots that wait for writeback never come free while anything is read ahead."""
    with Engine(fault_script="any * delay 2", block_nbytes=4096, queue_depth=4) as engine:
        file = engine.open(swap_path)
        queue = engine.read(file, 0, torch.empty(1 << 20, dtype=torch.uint8), lane=first)
        engine.write(file, 8 << 20, torch.zeros(4096, dtype=torch.uint8), lane=second).wait()
        assert not queue.done()


@pytest.mark.parametrize("lane", list(Lane))
def test_batch_in_random_order_goes_to_the_drive_in_its_order(
    swap_path: Path, lane: Lane
) -> None:
    """Else small transfers run at a quarter of their speed."""
    with Engine(fault_script="write 1 errno 5; write 3 errno 5", queue_depth=1) as engine:
        file = engine.open(swap_path)
        buffer = torch.zeros(4096, dtype=torch.uint8)
        places = (24576, 0, 16384, 8192)  # no neighbours
        request = engine.write_many(file, places, [buffer] * len(places), lane=lane)
        failed = request.failed()
    assert {places[index] for index in failed} == {0, 16384}
    assert all(error.offset_bytes == places[index] for index, error in failed.items())


def test_opener_with_a_useless_limit_is_told() -> None:
    """Else no background transfer fits in it."""
    with pytest.raises(SwapUsageError):
        Engine(background_nbytes=100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_tensor_on_aligned_memory_is_copied_in_its_last_sector_only(
    swap_path: Path, random_bytes: MakeBytes, backend: str
) -> None:
    """Else a tensor of odd length passes through memory twice, and the copy costs more than the
    transfer."""
    source = random_bytes((1 << 20) - 4096 + 100)
    memory = random_bytes(source.nbytes + 4096)
    destination, beyond = memory.split((source.nbytes, 4096))
    kept = beyond.clone()
    with Engine(backend=backend) as engine:
        file = engine.open(swap_path)
        engine.write(file, 4096, source).wait()
        assert engine.stats().bounced_nbytes == 100
        engine.read(file, 4096, destination).wait()
        stats = engine.stats()
    assert torch.equal(source, destination)
    assert torch.equal(beyond, kept)
    assert stats.bounced_nbytes == 200
    assert (stats.read_direct_nbytes, stats.write_direct_nbytes) == (1 << 20, 1 << 20)
    written = swap_path.read_bytes()
    assert written[4096 : 4096 + source.nbytes] == source.numpy().tobytes()
    assert not any(written[4096 + source.nbytes :])
