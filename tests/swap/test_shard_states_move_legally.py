"""The state of a shard changes along the written arrows only."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nvmeswap.memory.pool import Pool, SlotClass
from nvmeswap.swap.shard import LEGAL_MOVES, Resident, ShardState


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
