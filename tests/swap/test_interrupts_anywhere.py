"""Ctrl-C at any point of a call leaves a swapper that works, and memory that is nobody's alone."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.pool import Pool, SlotClass
from tests.swap.interrupts import interrupted_everywhere

HANG_S = 100


@pytest.fixture(autouse=True)
def told_where_it_hangs() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def values(fill: float) -> dict[str, torch.Tensor]:
    return {f"k{i}": torch.full((1024,), fill) for i in range(4)}


def test_after_a_read_that_was_interrupted_anywhere_all_is_read(tmp_path: Path) -> None:
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out_many(values(7.0))
        count = 0
        for point in interrupted_everywhere(lambda: swapper.swap_in_many(values(0.0))):
            others = list(values(0.0).values())
            back = swapper.swap_in_many(values(0.0))
            assert all((tensor == 7.0).all() for tensor in back.values()), point
            assert not any(tensor.any() for tensor in others), point
            count += 1
        assert count > 100


def test_after_a_write_that_was_interrupted_anywhere_the_next_one_counts(tmp_path: Path) -> None:
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out_many(values(0.0))
        given = values(9.0)
        count = 0
        for point in interrupted_everywhere(lambda: swapper.swap_out_many(given)):
            swapper.swap_out_many(values(float(point)))
            back = swapper.swap_in_many(values(-1.0))
            assert all((tensor == point).all() for tensor in back.values()), point
            count += 1
        assert count > 100


def test_after_a_first_write_that_was_interrupted_anywhere_it_can_be_repeated(
    tmp_path: Path,
) -> None:
    with TensorSwapper(tmp_path) as swapper:
        given = values(9.0)
        keys = iter(range(10_000))
        write = lambda: swapper.swap_out(f"new{next(keys)}", given["k0"])  # noqa: E731
        for point in interrupted_everywhere(write):
            key = f"new{point}"
            swapper.swap_out(key, given["k1"])
            assert torch.equal(swapper.swap_in(key), given["k1"]), point


def test_a_slot_whose_acquisition_was_interrupted_anywhere_comes_back(tmp_path: Path) -> None:
    classes = [SlotClass(4096, 2)]
    arena = Arena(Pool.nbytes_needed(classes), pin_memory=False)
    pool = Pool(arena.memory, classes, name="test")

    def borrow() -> None:
        pool.acquire(100, holder="it", timeout_s=1.0).release()

    for _ in interrupted_everywhere(borrow):
        pool.release_orphans(())
        assert pool.stats().free_count == 2
