"""Copies that were made in vain, and what becomes of their memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nvmeswap.swap import shard
from nvmeswap.zero3 import ahead as under_test
from nvmeswap.zero3.ahead import DeviceAhead
from tests.swap.interrupts import interrupted_everywhere
from tests.zero3.late_streams import Gpu, Late
from tests.zero3.test_ahead_is_never_stale import KEYS, NUMEL, swapper

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def copies_in_flight(patch: pytest.MonkeyPatch) -> Iterator[tuple[Gpu, DeviceAhead, Callable]]:
    """Again and again: two shards are on their way to the GPU, which has not got to them."""
    while True:
        gpu = Gpu(eager=False)
        patch.setattr(under_test, "torch", gpu)
        patch.setattr(shard, "torch", gpu)
        with swapper() as params:
            ahead = DeviceAhead(params, CUDA, 2 * 4 * NUMEL)
            ahead.look_ahead()
            yield gpu, ahead, params.end_step


@pytest.mark.parametrize("way", ["a step is over", "another is used"])
def test_memory_of_copies_that_are_dropped_is_not_reused_before_they_are_over(
    patch: pytest.MonkeyPatch, way: str
) -> None:
    made = copies_in_flight(patch)
    gpu, ahead, end_step = next(made)

    def drop() -> None:
        nonlocal gpu, ahead, end_step
        if way == "a step is over":
            ahead.look_ahead()
        else:
            ahead.take(KEYS[5])

    def ready() -> None:
        nonlocal gpu, ahead, end_step
        gpu, ahead, end_step = next(made)
        if way == "a step is over":
            end_step()

    ready()
    for point in interrupted_everywhere(drop):
        fresh = [gpu.empty(NUMEL, dtype=torch.float32, device=CUDA) for _ in range(4)]
        seen: list[torch.Tensor] = []
        gpu.compute.finish()  # the computing stream comes first, then the one that copies
        for stream in gpu.side_streams:
            stream.finish()
        for memory in fresh:
            gpu.read(memory, seen)
        gpu.compute.finish()
        assert all(bool(each.isnan().all()) for each in seen), point
        ready()


def test_where_there_is_no_room_nothing_that_was_copied_ahead_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that is full has better uses for it than copies of which no more are to come."""
    gpu = Gpu(eager=True)
    monkeypatch.setattr(under_test, "torch", gpu)
    monkeypatch.setattr(shard, "torch", gpu)
    taken: list[weakref.ref[Late]] = []
    allocate = gpu.empty

    def empty(*args: Any, **options: Any) -> Late:
        if len(taken) == 2:
            raise torch.OutOfMemoryError("full")
        memory = allocate(*args, **options)
        taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(gpu, "empty", empty)
    with swapper() as params:
        ahead = DeviceAhead(params, torch.device("cuda"), 4 * 4 * NUMEL)
        with pytest.warns(RuntimeWarning, match="no room"):
            ahead.look_ahead()
        gc.collect()
        assert [memory() for memory in taken] == [None, None]
