"""What a write leaves in memory, whatever ends it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapError, SwapUsageError, SwapWriteError
from nvmeswap.io.engine import Lane
from tests.swap.conftest import Bench
from tests.swap.interrupts import interrupted_everywhere
from tests.swap.test_params_pool_sizes import assert_fetches, fill, specs_of, values_of


@pytest.mark.parametrize("piece", [1, 2])
def test_second_write_that_failed_leaves_nothing_of_itself_in_memory(
    bench: Bench, piece: int
) -> None:
    """As a first one: what was written last is in memory when it is written again."""
    (spec,) = specs_of([(1 << 22) + 1000])  # two pieces
    swapper = bench.params([spec], max_in_cpu=10**9)
    swapper.write(spec.key, values_of(spec))
    bench.engine.inject(f"write {piece} errno 28")
    with pytest.raises(SwapWriteError, match=r"params\.swp"):
        swapper.write(spec.key, values_of(spec, 1))
    out = torch.empty(spec.numel, dtype=spec.dtype)
    try:
        swapper.fetch(spec.key, out)
    except SwapUsageError:
        return
    assert torch.equal(out, values_of(spec)), "fetched what never reached the drive"


def test_what_is_kept_stays_within_max_in_cpu_after_writes_that_were_interrupted(
    bench: Bench,
) -> None:
    specs = specs_of([4096] * 6)
    swapper = bench.params(specs, buffer_count=4, max_in_cpu=4096)
    fill(swapper, specs)
    (pool,) = bench.pools
    count = 0
    for point in interrupted_everywhere(lambda: swapper.write("p0", values_of(specs[0]))):
        for spec in specs:
            swapper.write(spec.key, values_of(spec))
            assert_fetches(swapper, spec)
        stats = swapper.stats()
        assert stats.cached_nbytes <= 4096 * 2, point
        assert pool.stats().in_use_count == stats.held_slot_count, point
        for spec in reversed(specs):  # the first has no slot again
            assert_fetches(swapper, spec)
        for spec in specs[1:]:
            assert_fetches(swapper, spec)
        count += 1
    assert count > 50


@pytest.mark.parametrize("fault", ["errno 5", "errno 28"])
def test_write_that_failed_and_was_interrupted_leaves_nothing_of_itself(
    tmp_path: Path, fault: str
) -> None:
    """Whoever sees that a write takes long, or fails, presses Ctrl-C."""
    bench = Bench(tmp_path)
    try:
        (spec,) = specs_of([1000])
        swapper = bench.params([spec], max_in_cpu=10**9)

        def write() -> None:
            bench.engine.inject(f"write 1 {fault}")
            with contextlib.suppress(SwapError):
                swapper.write(spec.key, values_of(spec, 1))

        for point in interrupted_everywhere(write):
            out = torch.empty(spec.numel, dtype=spec.dtype)
            try:
                swapper.fetch(spec.key, out)
            except SwapError:
                pass
            else:
                raise AssertionError(f"{point}: fetched what never reached the drive")
    finally:
        bench.close()


def test_second_write_that_was_interrupted_reads_the_same_from_memory_and_from_the_drive(
    bench: Bench,
) -> None:
    """Else the shard changes, or is lost, when its slot is given to another."""
    (spec,) = specs_of([4096])
    swapper = bench.params([spec], max_in_cpu=4096)
    out, stored = (torch.empty(spec.numel, dtype=spec.dtype) for _ in range(2))
    swapper.write(spec.key, values_of(spec))
    for point in interrupted_everywhere(lambda: swapper.write(spec.key, values_of(spec, 1))):
        try:
            swapper.fetch(spec.key, out)
        except SwapUsageError:  # its last write failed: loud, whoever asks
            pass
        else:
            bench.store.read(spec.key, stored, lane=Lane.DEMAND).wait()
            assert torch.equal(out, stored), point
        swapper.write(spec.key, values_of(spec))
