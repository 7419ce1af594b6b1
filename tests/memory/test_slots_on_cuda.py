"""A slot that a GPU copies from is lent again once that copy is over. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

from nvmeswap.memory.arena import Arena
from nvmeswap.memory.pool import Pool, SlotClass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LONG_S = 20.0


def test_slot_when_a_real_gpu_copy_reads_it_is_lent_afterwards() -> None:
    """CUDA's own event and a registered arena."""
    classes = [SlotClass(64 << 20, 1)]
    arena = Arena(Pool.nbytes_needed(classes))
    assert arena.memory.is_pinned()
    pool = Pool(arena.memory, classes, name="gpu")
    for value in range(1, 20):
        slot = pool.acquire(1, holder=str(value), timeout_s=LONG_S)
        slot.memory.fill_(value)
        copied = slot.memory.to("cuda", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        slot.release_after(event)
        nxt = pool.acquire(1, holder="poison", timeout_s=LONG_S)
        nxt.memory.fill_(255)
        nxt.release()
        assert bool((copied == value).all())
    arena.close()
