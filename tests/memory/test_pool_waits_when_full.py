"""A full pool waits, in order, up to a limit; demand is never overtaken by prefetch."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.errors import SwapPoolTimeoutError, SwapUsageError
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.pool import Pool, Slot, SlotClass

LONG_S = 20.0


def make_pool(*classes: tuple[int, int]) -> Pool:
    slot_classes = [SlotClass(nbytes, count) for nbytes, count in classes]
    arena = Arena(Pool.nbytes_needed(slot_classes), pin_memory=False)
    return Pool(arena.memory, slot_classes, name="test")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.0005)


@contextmanager
def waiter(pool: Pool, holder: str, results: queue.Queue[tuple[str, Slot]]) -> Iterator[None]:
    """A thread that is waiting for a slot of one byte when the block begins."""
    before = pool.stats().wait_count

    def wait() -> None:
        results.put((holder, pool.acquire(1, holder=holder, timeout_s=LONG_S)))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: pool.stats().wait_count == before + 1)
    yield
    thread.join(LONG_S)
    assert not thread.is_alive()


class ManualEvent:
    """Stands for torch.cuda.Event where there is no GPU: happens when the test says so."""

    def __init__(self) -> None:
        self.happened = False
        self.on_query: Callable[[], object] = lambda: None

    def query(self) -> bool:
        self.on_query()
        return self.happened


def as_cuda(event: ManualEvent) -> torch.cuda.Event:
    return cast(torch.cuda.Event, event)


def test_demand_when_pool_is_full_waits_for_release() -> None:
    """A run stops with "not enough buffers", although one is about to become free."""
    # field case P01
    pool = make_pool((4096, 1))
    held = pool.acquire(1, holder="layer 0", timeout_s=0)
    results: queue.Queue[tuple[str, Slot]] = queue.Queue()
    with waiter(pool, "layer 1", results):
        assert results.empty()
        held.release()
    assert results.get_nowait()[1].holder == "layer 1"
    assert pool.stats().wait_count == 1 and pool.stats().wait_s > 0


def test_demand_when_nothing_is_released_times_out_naming_the_holders() -> None:
    """A spinning allocate() hangs for ever, and nobody knows who has the buffers."""
    # field case H02
    pool = make_pool((4096, 2), (8192, 1))
    small = [pool.acquire(100, holder=f"layer {i}", timeout_s=0) for i in range(2)]
    pool.acquire(8192, holder="embedding", timeout_s=0)
    with pytest.raises(SwapPoolTimeoutError) as caught:
        pool.acquire(4096, holder="layer 2", timeout_s=0.02)
    assert set(caught.value.holders) == {"layer 0", "layer 1"}
    assert caught.value.wanted_nbytes == 4096
    small[0].release()
    assert pool.acquire(4096, holder="layer 2", timeout_s=0).nbytes == 4096


def test_waiters_when_slots_come_back_are_served_in_order() -> None:
    """A waiter that is overtaken again and again waits for ever."""
    pool = make_pool((4096, 1))
    held = pool.acquire(1, holder="first", timeout_s=0)
    results: queue.Queue[tuple[str, Slot]] = queue.Queue()
    order = []
    with waiter(pool, "a", results), waiter(pool, "b", results), waiter(pool, "c", results):
        held.release()
        for _ in range(3):
            holder, slot = results.get(timeout=LONG_S)
            order.append(holder)
            slot.release()
    assert order == ["a", "b", "c"]


def test_prefetch_when_demand_waits_gets_nothing() -> None:
    """Prefetch that takes each slot just as it is released starves the layer that is needed now."""
    pool = make_pool((4096, 1))
    held = pool.acquire(1, holder="first", timeout_s=0)
    results: queue.Queue[tuple[str, Slot]] = queue.Queue()
    with waiter(pool, "demand", results):
        held.release()
        assert pool.try_acquire(1, holder="prefetch") is None
    slot = results.get_nowait()[1]
    assert pool.try_acquire(1, holder="prefetch") is None
    slot.release()
    assert pool.try_acquire(1, holder="prefetch") is not None


def test_planner_when_it_holds_all_slots_keeps_them_from_the_second() -> None:
    """A read promised at planning time must not fail later for lack of buffers."""
    # field case P05: the second planner fails at once, not in its third read
    pool = make_pool((4096, 3))
    promised = [pool.try_acquire(4096, holder="plan 1") for _ in range(3)]
    assert None not in promised
    assert pool.try_acquire(4096, holder="plan 2") is None


def test_batch_when_it_fails_midway_leaves_the_pool_whole() -> None:
    """An early return that keeps buffers or a lock stops every later swap."""
    # field case H03: right free 3 after the error, and the next call works
    pool = make_pool((4096, 3))
    batch: list[Slot] = []
    with pytest.raises(SwapPoolTimeoutError):
        for index in range(4):
            batch.append(pool.acquire(4096, holder=f"shard {index}", timeout_s=0))
    for slot in batch:
        slot.release()
    assert pool.stats().free_count == 3
    assert pool.try_acquire(4096, holder="next") is not None


def test_request_when_larger_than_every_slot_is_refused_at_once() -> None:
    """A 524 M element embedding against small buffers must say so, not wait."""
    # field case P03
    pool = make_pool((4096, 2))
    with pytest.raises(SwapUsageError) as caught:
        pool.acquire(4097, holder="embedding", timeout_s=LONG_S)
    assert (caught.value.wanted_nbytes, caught.value.got_nbytes) == (4097, pool.largest_nbytes)
    with pytest.raises(SwapUsageError):
        pool.try_acquire(4097, holder="embedding")
    with pytest.raises(SwapUsageError):
        make_pool().acquire(0, holder="nobody", timeout_s=0)


def test_request_when_its_class_is_full_leaves_larger_slots_alone() -> None:
    """Small shards that spread into the large slots would block the largest layer."""
    pool = make_pool((4096, 1), (8192, 1))
    assert pool.try_acquire(1, holder="small") is not None
    assert pool.try_acquire(1, holder="small") is None
    large = pool.try_acquire(5000, holder="large")
    assert large is not None and large.nbytes == 8192


@pytest.mark.parametrize("second", ["release", "release_after"])
@pytest.mark.parametrize("first", ["release", "release_after"])
def test_slot_when_released_twice_is_our_bug(first: str, second: str) -> None:
    """A slot in the free list twice is lent to two layers, whose values mix."""
    pool = make_pool((4096, 2))
    slot = pool.acquire(1, holder="layer", timeout_s=0)
    event = as_cuda(ManualEvent())
    calls: dict[str, Callable[[], None]] = {
        "release": slot.release, "release_after": lambda: slot.release_after(event)
    }
    calls[first]()
    with pytest.raises(AssertionError):
        calls[second]()


def test_slot_when_a_copy_still_reads_it_is_not_lent() -> None:
    """A slot reused while the GPU copies from it gives the layer another layer's weights."""
    pool = make_pool((4096, 1))
    event = ManualEvent()
    pool.acquire(1, holder="layer 0", timeout_s=0).release_after(as_cuda(event))
    assert pool.try_acquire(1, holder="layer 1") is None
    assert pool.stats().in_use_count == 1
    results: queue.Queue[tuple[str, Slot]] = queue.Queue()
    with waiter(pool, "layer 1", results):
        event.happened = True
    assert results.get_nowait()[0] == "layer 1"


def test_waiter_when_the_slot_is_released_after_an_event_wakes_up() -> None:
    """A waiter that came before the copy was recorded must notice its end."""
    pool = make_pool((4096, 1))
    held = pool.acquire(1, holder="layer 0", timeout_s=0)
    event = ManualEvent()
    results: queue.Queue[tuple[str, Slot]] = queue.Queue()
    with waiter(pool, "layer 1", results):
        held.release_after(as_cuda(event))
        event.happened = True
    assert results.get_nowait()[0] == "layer 1"


def test_cuda_call_when_it_comes_back_to_the_pool_does_not_deadlock() -> None:
    """A CUDA call made under the lock hangs if another thread, that CUDA waits for, wants it."""
    # field case H07
    pool = make_pool((4096, 2))
    other = pool.acquire(1, holder="other", timeout_s=0)
    event = ManualEvent()
    pool.acquire(1, holder="layer", timeout_s=0).release_after(as_cuda(event))

    def from_another_thread() -> None:
        thread = threading.Thread(target=other.release)
        thread.start()
        thread.join(LONG_S)
        assert not thread.is_alive()

    event.on_query = from_another_thread
    assert pool.acquire(1, holder="next", timeout_s=0).holder == "next"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 4 * 4096), st.booleans(), st.integers(0, 9)), max_size=40),
)
def test_pool_whatever_is_asked_stays_whole(
    classes: list[tuple[int, int]], calls: list[tuple[int, bool, int]]
) -> None:
    """Leaked slots stop a run after hours; overlapping ones mix layers."""
    # field case B10: right free + in use == count after every call
    pool = make_pool(*((pages * 4096, count) for pages, count in classes))
    held: list[Slot] = []
    for nbytes, wants, index in calls:
        if wants and nbytes <= pool.largest_nbytes:
            slot = pool.try_acquire(nbytes, holder="any")
            if slot is not None:
                assert slot.nbytes == slot.memory.numel() >= nbytes
                assert slot.memory.data_ptr() % 4096 == 0
                held.append(slot)
        elif held:
            held.pop(index % len(held)).release()
        stats = pool.stats()
        assert stats.in_use_count == len(held)
        assert stats.free_count + stats.in_use_count == stats.slot_count
        places = sorted((slot.memory.data_ptr(), slot.nbytes) for slot in held)
        for (start, length), (following, _) in itertools.pairwise(places):
            assert start + length <= following


def test_pool_when_many_threads_use_it_never_lends_a_slot_twice() -> None:
    """Two threads in one slot: silent wrong numbers."""
    pool = make_pool((4096, 2))
    wrong: list[str] = []

    def work(value: int) -> None:
        for _ in range(200):
            slot = pool.acquire(4096, holder=str(value), timeout_s=LONG_S)
            slot.memory.fill_(value)
            if not bool((slot.memory == value).all()):
                wrong.append(str(value))
            slot.release()

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert not wrong
    assert pool.stats().free_count == 2
