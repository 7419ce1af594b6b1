"""Parameter shards come back exact from pools of any size, and demand never fails for prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.errors import SwapReadError, SwapUsageError, SwapWriteError
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from tests.swap.conftest import Bench


def specs_of(sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[ShardSpec]:
    return [ShardSpec(f"p{index}", numel, dtype) for index, numel in enumerate(sizes)]


def values_of(spec: ShardSpec, generation: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((spec.key, generation)) % (1 << 31))
    return torch.randn(spec.numel, generator=generator).to(spec.dtype)


def fill(swapper: PartitionedParamSwapper, specs: Sequence[ShardSpec]) -> None:
    for spec in specs:
        swapper.write(spec.key, values_of(spec))


def assert_fetches(
    swapper: PartitionedParamSwapper, spec: ShardSpec, generation: int = 0
) -> None:
    guarded = torch.full((spec.numel + 16,), -7, dtype=spec.dtype)
    swapper.fetch(spec.key, guarded[8 : 8 + spec.numel])
    assert torch.equal(guarded[8 : 8 + spec.numel], values_of(spec, generation)), spec
    assert (guarded[:8] == -7).all() and (guarded[8 + spec.numel :] == -7).all()


@pytest.mark.parametrize("buffer_count", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("max_in_cpu", [0, 30_000, 10**9])
def test_twelve_layers_with_any_number_of_buffers_run_every_step(
    bench: Bench, buffer_count: int, max_in_cpu: int
) -> None:
    """Peers stop in step 2, when reading ahead begins.  field cases P01, P02"""
    specs = specs_of([10_000] * 12)
    swapper = bench.params(specs, buffer_count=buffer_count, max_in_cpu=max_in_cpu)
    fill(swapper, specs)
    for _ in range(5):
        for spec in [*specs, *reversed(specs)]:
            assert_fetches(swapper, spec)
        swapper.end_step()
    (pool,) = bench.pools
    stats = pool.stats()
    assert stats.free_count + stats.in_use_count == stats.slot_count
    if max_in_cpu == 10**9:
        assert stats.slot_count == 12
        assert swapper.stats().hit_count == swapper.stats().fetch_count


def test_shards_larger_than_a_buffer_are_streamed(bench: Bench) -> None:
    """Peers refuse an embedding larger than their buffer.  field case P03"""
    specs = specs_of([4096, 4097, 50_000], torch.float32)
    swapper = bench.params(specs, buffer_count=2, largest_slot_numel=4096)
    fill(swapper, specs)
    for _ in range(3):
        for spec in specs:
            assert_fetches(swapper, spec)
        swapper.end_step()
    (pool,) = bench.pools
    assert pool.largest_nbytes == 4096 * 4


def test_what_is_kept_between_uses_stays_within_max_in_cpu(bench: Bench) -> None:
    """Else host memory fills up whatever the setting says; and with room, nothing is read twice."""
    specs = specs_of([10_240] * 8)
    swapper = bench.params(specs, buffer_count=1, max_in_cpu=3 * 10_240)
    fill(swapper, specs)
    for _ in range(3):
        for spec in specs:
            assert_fetches(swapper, spec)
        swapper.end_step()
    (pool,) = bench.pools
    assert pool.stats().slot_count == 1 + 3
    assert swapper.stats().cached_nbytes <= 4 * 20_480


def test_nothing_kept_and_one_slot_reads_every_use_from_the_disk(bench: Bench) -> None:
    """max_in_cpu 0 must be honoured: what a test of NVMe measures has to come from NVMe."""
    specs = specs_of([10_000] * 4)
    swapper = bench.params(specs, buffer_count=1)
    fill(swapper, specs)
    before = bench.store.stats().read_nbytes
    for _ in range(2):
        for spec in specs:
            assert_fetches(swapper, spec)
        swapper.end_step()
    assert bench.store.stats().read_nbytes - before >= 2 * 4 * 20_000


@pytest.mark.parametrize("room", [0, 1, 3])
def test_what_is_written_stays_as_far_as_there_is_room(bench: Bench, room: int) -> None:
    """Else the first pass reads what has just been written."""
    specs = specs_of([10_000] * 3)
    swapper = bench.params(specs, max_in_cpu=room * 10_000)
    fill(swapper, specs)
    assert swapper.stats().cached_nbytes == room * 20_000
    for spec in specs:
        assert_fetches(swapper, spec)
    assert bench.store.stats().read_nbytes == (3 - room) * 20_000
    for generation in (1, 2):
        for spec in specs:
            swapper.write(spec.key, values_of(spec, generation))
            assert_fetches(swapper, spec, generation)


@pytest.mark.parametrize("piece", [1, 2])
def test_write_that_failed_leaves_nothing_of_itself_in_memory(bench: Bench, piece: int) -> None:
    """What has not reached the drive must not be taken for the shard."""
    (spec,) = specs_of([(1 << 22) + 1000])  # two pieces
    swapper = bench.params([spec], max_in_cpu=10**9)
    bench.engine.inject(f"write {piece} errno 28")
    with pytest.raises(SwapWriteError, match=r"params\.swp"):
        swapper.write(spec.key, values_of(spec))
    assert swapper.stats().cached_nbytes == 0
    with pytest.raises(SwapUsageError, match="its last write failed"):
        swapper.fetch(spec.key, torch.empty(spec.numel, dtype=spec.dtype))
    swapper.write(spec.key, values_of(spec, 1))
    assert_fetches(swapper, spec, 1)


def test_write_that_failed_leaves_no_mixture_of_a_kept_shard(bench: Bench) -> None:
    """Its first piece and those under way are new, the rest is old."""
    (spec,) = specs_of([(2 << 22) + 1000])  # three pieces
    swapper = bench.params([spec], max_in_cpu=10**9)
    fill(swapper, [spec])
    assert swapper.stats().cached_nbytes == spec.nbytes
    bench.engine.inject("write 1 errno 28")
    with pytest.raises(SwapWriteError, match=r"params\.swp"):
        swapper.write(spec.key, values_of(spec, 1))
    with pytest.raises(SwapUsageError, match="its last write failed"):
        swapper.fetch(spec.key, torch.empty(spec.numel, dtype=spec.dtype))
    swapper.write(spec.key, values_of(spec, 2))
    assert_fetches(swapper, spec, 2)


class InterruptedInTheMiddle(torch.Tensor):
    """Ctrl-C comes while its second part is used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.to and args[0].storage_offset():
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("max_in_cpu", [0, 10**9])
def test_interrupted_write_is_not_read_as_old_and_new(bench: Bench, max_in_cpu: int) -> None:
    (spec,) = specs_of([(1 << 22) + 1000])
    swapper = bench.params([spec], max_in_cpu=max_in_cpu)
    swapper.write(spec.key, values_of(spec))
    with pytest.raises(KeyboardInterrupt):
        swapper.write(spec.key, values_of(spec, 1).as_subclass(InterruptedInTheMiddle))
    with pytest.raises(SwapUsageError, match="its last write failed"):
        swapper.fetch(spec.key, torch.empty(spec.numel, dtype=spec.dtype))
    swapper.write(spec.key, values_of(spec, 2))
    assert_fetches(swapper, spec, 2)


def test_small_and_empty_shards_stay_in_memory(bench: Bench) -> None:
    """Exactly at the limit a shard is swapped; below it, it is not; an empty one has no file.
    field cases O06, N06"""
    specs = specs_of([0, 511, 512, 5000])
    swapper = bench.params(specs, min_swap_nbytes=1024)
    fill(swapper, specs)
    assert swapper.stats().ram_nbytes == 2 * 511
    assert swapper.stats().nvme_nbytes == 2 * 5512
    for spec in specs:
        assert_fetches(swapper, spec)
    with pytest.raises(SwapUsageError):
        bench.store.spec("p0")


def test_update_reaches_copies_in_memory_and_reads_under_way(bench: Bench) -> None:
    """Else a prefetched shard would be used with its old values.  field case D06"""
    specs = specs_of([20_000] * 3)
    swapper = bench.params(specs, buffer_count=3, max_in_cpu=20_000)
    fill(swapper, specs)
    for generation in range(1, 5):
        for spec in specs:
            assert_fetches(swapper, spec, generation - 1)
        swapper.end_step()
        for spec in specs:
            fresh = values_of(spec, generation)
            requests = [
                request
                for start in range(0, spec.numel, 4096)
                for request in swapper.update(spec.key, start, fresh[start : start + 4096])
            ]
            for request in requests:
                request.wait()


def test_failed_read_ahead_fails_its_own_use_only(bench: Bench) -> None:
    """A bad sector under one shard must not stop the others, and reading again must work."""
    specs = specs_of([10_000] * 3)
    swapper = bench.params(specs, buffer_count=1)
    fill(swapper, specs)
    for spec in specs:
        assert_fetches(swapper, spec)
    swapper.end_step()
    bench.engine.inject("read 2 errno 5")
    assert_fetches(swapper, specs[0])
    with pytest.raises(SwapReadError) as raised:
        assert_fetches(swapper, specs[1])
    assert raised.value.path is not None and raised.value.path.name == "params.swp"
    assert_fetches(swapper, specs[1])
    assert_fetches(swapper, specs[2])


@settings(
    max_examples=30, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=25),
    buffer_count=st.integers(1, 3),
    max_in_cpu=st.integers(0, 20_000),
    largest=st.sampled_from([512, 4096, 1 << 40]),
)
def test_fetches_in_any_order_with_updates_between_are_exact(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    order: list[int],
    buffer_count: int,
    max_in_cpu: int,
    largest: int,
) -> None:
    """Order may change at every step (MoE, early exit): it costs time, never bits.
    field cases N01, N02, N03"""
    bench = Bench(tmp_path_factory.mktemp("order"))
    try:
        specs = specs_of(sizes)
        swapper = bench.params(
            specs, buffer_count=buffer_count, max_in_cpu=max_in_cpu, largest_slot_numel=largest
        )
        fill(swapper, specs)
        generations = dict.fromkeys(range(len(specs)), 0)
        for place, choice in enumerate(order):
            index = choice % len(specs)
            assert_fetches(swapper, specs[index], generations[index])
            if place % 3 == 0:
                generations[index] += 1
                swapper.write(specs[index].key, values_of(specs[index], generations[index]))
            if place % 4 == 3:
                swapper.end_step()
    finally:
        bench.close()
