"""What is read from the drive is what is needed, once, and it is under way before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from nvmeswap.errors import SwapReadError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.traffic import SubGroup
from tests.swap.conftest import Bench, set_gradients

LAYERS = [ShardSpec(f"layer{index}", 10_240, torch.bfloat16) for index in range(8)]


def fill(swapper: PartitionedParamSwapper, specs: list[ShardSpec]) -> None:
    for index, spec in enumerate(specs):
        swapper.write(spec.key, torch.full((spec.numel,), index, dtype=spec.dtype))


def fetch(swapper: PartitionedParamSwapper, specs: list[ShardSpec], index: int) -> None:
    out = torch.full((specs[index].numel,), -7, dtype=specs[index].dtype)
    swapper.fetch(specs[index].key, out)
    assert bool((out == index).all())


def read_requests(bench: Bench) -> int:
    """Of the store, through its bytes: all layers are of one size."""
    return bench.store.stats().read_nbytes // LAYERS[0].nbytes


@pytest.mark.parametrize("budget", (0, 1, 3, 7, 8))
def test_step_reads_just_the_layers_that_do_not_fit(bench: Bench, budget: int) -> None:
    """Memory that is there stays empty while all parameters go to and fro.  field case L02

    A budget of 3 of 8 layers: 5 reads a step, also in the first: those that were written last may
    stay.
    """
    swapper = bench.params(LAYERS, buffer_count=1, max_in_cpu=budget * LAYERS[0].numel)
    fill(swapper, LAYERS)
    reads_by_step = []
    for _ in range(6):
        before = read_requests(bench)
        for index in range(8):
            fetch(swapper, LAYERS, index)
        swapper.end_step()
        reads_by_step.append(read_requests(bench) - before)
    assert reads_by_step[0] <= 8 - budget
    # Reads for the next step's first layers are counted in the step that starts them.
    steady = reads_by_step[2:]
    assert sum(steady) <= len(steady) * (8 - budget), reads_by_step
    assert swapper.stats().cached_nbytes <= (budget + 1) * LAYERS[0].nbytes


def test_fetch_of_a_group_reads_its_bytes_and_padding_once(bench: Bench) -> None:
    """Peers read each group twice and throw the first result away.  field case L05"""
    specs = [ShardSpec(f"group.{index}", 1_000_000, torch.uint8) for index in range(3)]
    swapper = bench.params(specs, buffer_count=3)
    fill(swapper, specs)
    before = bench.engine.stats()
    for index in range(3):
        fetch(swapper, specs, index)
    after = bench.engine.stats()
    read_nbytes = (after.read_direct_nbytes + after.read_buffered_nbytes
                   - before.read_direct_nbytes - before.read_buffered_nbytes)
    direct = after.read_direct_nbytes > before.read_direct_nbytes
    padded = padded_nbytes(1_000_000, bench.store.alignment_nbytes)
    assert read_nbytes == 3 * (padded if direct else 1_000_000)
    assert after.request_count - before.request_count == 3
    assert bench.store.stats().read_nbytes == 3_000_000


def test_layers_are_under_way_before_their_use_from_the_second_step_on(bench: Bench) -> None:
    """Reads that begin at the use stand still while the device computes, and it while they run.

    field case L01, without a GPU and without a clock: which reads were started ahead, in counters
    """
    swapper = bench.params(LAYERS, buffer_count=3)
    fill(swapper, LAYERS)
    for _ in range(2):
        for index in range(8):
            fetch(swapper, LAYERS, index)
        swapper.end_step()
    before = swapper.stats()
    requests_before = bench.engine.stats().request_count
    for index in range(8):
        fetch(swapper, LAYERS, index)
        # While this layer computes, the next one is being read or has been.
        started = bench.engine.stats().request_count - requests_before
        assert started >= min(index + 1, 7)
    stats = swapper.stats()
    assert stats.prefetch_count - before.prefetch_count >= 7
    assert stats.fetch_count - before.fetch_count == 8


@pytest.fixture
def six_sub_groups(
    bench: Bench, parameters: Callable[..., list[torch.nn.Parameter]]
) -> PipelinedOptimizerSwapper:
    """After a step, with the last three still in three buffers: a walk back finds them there."""
    params = parameters([4096] * 6)
    optimizer = bench.adamw(params)
    for step in range(2):  # the first one reads nothing
        set_gradients(params, step)
        optimizer.step()
    return optimizer.swapper


def test_next_sub_group_is_being_read_when_one_is_updated(
    bench: Bench, six_sub_groups: PipelinedOptimizerSwapper
) -> None:
    """A step that reads, updates and writes in turn takes the sum of the three.  field case L01"""
    began = bench.engine.stats().request_count
    reads_begun: list[int] = []

    def visit(group: SubGroup) -> bool:
        written = len(reads_begun)  # one request for each sub-group before this one
        reads_begun.append(bench.engine.stats().request_count - began - written)
        while bench.engine.stats().in_flight_count:
            threading.Event().wait(0.001)  # an update that takes longer than the drive
        return True

    six_sub_groups.walk(visit, [0, 1, 2, 3, 4, 5])
    # The third to be visited is the last that is in memory: the fourth must be on its way by then.
    assert all(begun >= least for begun, least in zip(reads_begun[2:], (1, 2, 3, 3), strict=True))
    assert reads_begun[-1] == 3


def test_last_sub_group_is_being_written_when_one_is_updated(
    bench: Bench, six_sub_groups: PipelinedOptimizerSwapper
) -> None:
    """The same for writes: one that never ends doesn't keep the next update.  field case L01"""
    in_flight: list[int] = []

    def visit(group: SubGroup) -> bool:
        while len(in_flight) == 1 and not bench.engine.stats().in_flight_count:
            threading.Event().wait(0.001)  # the engine has been told of it, and will begin it
        in_flight.append(bench.engine.stats().in_flight_count)
        if len(in_flight) == 2:
            bench.engine.inject("")  # lets it go
        return True

    bench.engine.inject("write 1 never")
    six_sub_groups.walk(visit, [0, 1, 2, 3, 4, 5])
    assert in_flight[0] == 0
    assert in_flight[1] >= 1
    assert len(in_flight) == 6


@pytest.mark.parametrize("buffer_count", (1, 3))
def test_fetch_that_fails_keeps_neither_slot_nor_lock(bench: Bench, buffer_count: int) -> None:
    """An early return that keeps a lock or a slot stops every later swap.  field case H03

    Four shards through fewer slots. A use that finds none takes the slot of what is needed last, so
    that what can fail is the read.
    """
    specs = LAYERS[:4]
    swapper = bench.params(specs, buffer_count=buffer_count)
    fill(swapper, specs)
    for index in range(4):
        fetch(swapper, specs, index)
    swapper.end_step()
    bench.engine.inject("read * errno 5")
    (pool,) = bench.pools
    for spec in specs * 2:
        out = torch.full((spec.numel,), -7, dtype=spec.dtype)
        with pytest.raises(SwapReadError):
            swapper.fetch(spec.key, out)
        assert pool.stats().free_count == pool.stats().slot_count
    bench.engine.inject("")
    done: list[int] = []

    def fetch_all() -> None:  # from another thread, which a lock that was kept would stop
        for index in range(4):
            try:
                fetch(swapper, specs, index)
            except SwapReadError:  # read ahead before the drive was mended
                fetch(swapper, specs, index)
            done.append(index)

    thread = threading.Thread(target=fetch_all, daemon=True)
    thread.start()
    thread.join(20)
    assert done == [0, 1, 2, 3]
