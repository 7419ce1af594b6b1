"""The state of a shard changes along the written arrows only."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapTimeoutError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.memory.pool import Pool, SlotClass
from nvmeswap.store.store import StoreRequest, TensorSpec
from nvmeswap.swap.shard import LEGAL_MOVES, Resident, ShardState
from tests.swap.conftest import Bench


@pytest.mark.parametrize(("start", "end"), list(product(ShardState, ShardState)))
def test_shard_for_each_pair_of_states_moves_or_asserts(start: ShardState, end: ShardState) -> None:
    """Else a slot could be evicted while the disk still writes from it."""
    memory = torch.empty(8192, dtype=torch.uint8)
    pool = Pool(memory[-memory.data_ptr() % 4096 :][:4096], [SlotClass(4096, 1)], name="one")
    slot = pool.try_acquire(1, holder="shard")
    shard = Resident("shard", state=start, slot=None if end is ShardState.ON_NVME else slot)
    if end in LEGAL_MOVES[start]:
        shard.move(end)
        assert shard.state is end
    else:
        with pytest.raises(AssertionError):
            shard.move(end)
        assert shard.state is start


@pytest.mark.parametrize("end", [s for s in ShardState if s is not ShardState.ON_NVME])
def test_shard_without_a_slot_can_not_be_in_memory(end: ShardState) -> None:
    """Else its bytes would be nowhere."""
    start = next(state for state, ends in LEGAL_MOVES.items() if end in ends)
    with pytest.raises(AssertionError):
        Resident("shard", state=start).move(end)


def test_slot_is_kept_until_the_last_of_several_reads_has_landed(tmp_path: Path) -> None:
    """Else the late one overwrites what another holder has put there."""
    bench = Bench(tmp_path, timeout_s=0.3)
    pool = bench.pool([SlotClass(8192, 1)])
    assert pool is not None
    bench.store.create_file("some.swp", {"shard": TensorSpec(torch.uint8, (4096,), (1,))})
    bench.store.write("shard", torch.ones(4096, dtype=torch.uint8), lane=Lane.DEMAND).wait()
    slot = pool.try_acquire(8192, holder="shard")
    assert slot is not None
    memory = slot.memory

    def read() -> list[StoreRequest]:
        return [bench.store.read("shard", memory[:4096], lane=Lane.DEMAND)]

    def refuse() -> list[StoreRequest]:
        raise SwapUsageError("not this one")

    bench.engine.inject("read 1 never")
    shard = Resident("shard")
    shard.start_reading(slot, read, refuse)
    with pytest.raises(SwapTimeoutError):
        shard.finish_reading()
    assert shard.slot is slot and pool.stats().free_count == 0
    bench.engine.inject("")
    with pytest.raises(SwapUsageError, match="not this one"):
        shard.finish_reading()
    assert shard.state is ShardState.ON_NVME and pool.stats().free_count == 1
    assert bool((memory[:4096] == 1).all())

    slot = pool.try_acquire(8192, holder="shard")
    assert slot is not None
    with pytest.raises(SwapUsageError):
        shard.start_reading(slot, refuse, read)
    assert shard.state is ShardState.ON_NVME and pool.stats().free_count == 1
    bench.close()
