"""Tensors that go through slots, on a drive that fails: an error for each key that it is of, and
slots that come back. Here the CPU counts as a GPU, so that it is the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap import TensorSwapper
from nvmeswap.config import SwapBlock
from nvmeswap.errors import (
    SwapBudgetError,
    SwapChecksumError,
    SwapError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.io.engine import Engine
from nvmeswap.memory.slot import SlotClass
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.swap import space, staging
from nvmeswap.swap.transit import Piece, Transit, packed
from tests.swap.interrupts import interrupted_everywhere

SLOT_NBYTES = 16384
SIZES = [1, 5000, 4096, SLOT_NBYTES - 1, SLOT_NBYTES, SLOT_NBYTES + 1, 3 * SLOT_NBYTES + 4096]


@pytest.fixture(autouse=True, params=[1, 3], ids=["one slot", "three slots"])
def through_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGED_DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(staging, "SLOTS", SlotClass(SLOT_NBYTES, request.param))


Open = Callable[..., tuple[TensorSwapper, Engine]]


@pytest.fixture
def open_swapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes a swapper on an engine that can be told to fail."""
    engines: list[Engine] = []
    opened: list[TensorSwapper] = []

    def faulty(**settings: Any) -> Engine:
        engines.append(Engine(**settings, fault_script="read 1000000 errno 5"))
        return engines[-1]

    def make(**settings: Any) -> tuple[TensorSwapper, Engine]:
        opened.append(TensorSwapper(tmp_path, swap=SwapBlock(**settings)))
        return opened[-1], engines[-1]

    monkeypatch.setattr(space, "Engine", faulty)
    yield make
    for swapper, engine in zip(opened, engines, strict=True):
        engine.inject("")
        swapper.close()


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{index} of {nbytes}": torch.randint(0, 256, (nbytes,), generator=generator,
                                              dtype=torch.uint8)
        for index, nbytes in enumerate(SIZES * 2)
    }


def poisoned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(tensor, 0xA5) for key, tensor in tensors.items()}


def names_in(error: SwapError, keys: dict[str, torch.Tensor]) -> set[str]:
    return {key for key in keys if f'"{key}"' in f"{error.what} {error.cause}"}


@pytest.mark.parametrize("at", [2, 5, 9])
@pytest.mark.parametrize(("number", "kind"), [(28, SwapSpaceError), (5, SwapWriteError)])
def test_tensor_that_could_not_be_written_is_named_and_the_others_are_stored(
    open_swapper: Open, at: int, number: int, kind: type[SwapError]
) -> None:
    swapper, engine = open_swapper()
    old, new = values(1), values(2)
    swapper.swap_out_many(old)
    copies = {key: tensor.clone() for key, tensor in new.items()}
    engine.inject(f"write {at} errno {number}")
    with pytest.raises(kind) as raised:
        swapper.swap_out_many(new)
    assert all(torch.equal(new[key], copies[key]) for key in new), "data in memory is intact"
    failed = names_in(raised.value, new)
    assert failed
    for key, tensor in new.items():
        if key in failed:
            with pytest.raises(SwapUsageError, match="never written"):
                swapper.swap_in(key)
        else:
            assert torch.equal(swapper.swap_in(key), tensor), key
    swapper.swap_out_many(new)
    assert all(torch.equal(each, new[key]) for key, each in swapper.swap_in_many(new).items())


@pytest.mark.parametrize("at", [2, 5, 9])
@pytest.mark.parametrize(("fault", "kind"), [("errno 5", SwapReadError),
                                             ("flip", SwapChecksumError)])
def test_tensor_that_could_not_be_read_is_named_and_the_others_are_good(
    open_swapper: Open, at: int, fault: str, kind: type[SwapError]
) -> None:
    swapper, engine = open_swapper()
    tensors = values(3)
    swapper.swap_out_many(tensors)
    out = poisoned(tensors)
    engine.inject(f"read {at} {fault}")
    with pytest.raises(kind) as raised:
        swapper.swap_in_many(tensors, out=out)
    failed = names_in(raised.value, tensors)
    assert failed
    assert all(torch.equal(out[key], tensors[key]) for key in tensors.keys() - failed)
    back = swapper.swap_in_many(tensors)
    assert all(torch.equal(each, tensors[key]) for key, each in back.items())


@pytest.mark.parametrize("seed", range(6))
def test_transfers_that_come_late_and_in_pieces_lose_nothing(
    open_swapper: Open, seed: int
) -> None:
    swapper, engine = open_swapper()
    for step in range(4):
        engine.inject(f"any {2 * seed + step + 1} short 4096; any {5 + step} short 8192; "
                      f"seed {10 * seed + step} rate 40 busy,delay,late")
        tensors = values(step)
        swapper.swap_out_many(tensors)
        back = swapper.swap_in_many(tensors)
        assert all(torch.equal(each, tensors[key]) for key, each in back.items())
        with pytest.raises(SwapUsageError):
            swapper.swap_in("unknown")


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_transfer_that_never_ends_is_a_timeout_and_its_slot_comes_back(
    open_swapper: Open, direction: str, at: int
) -> None:
    """Else one lost transfer takes all slots in time, or its bytes land in the next tensor's."""
    swapper, engine = open_swapper(timeout_s=0.3)
    tensors, new = values(4), values(5)
    swapper.swap_out_many(tensors)
    for _ in range(staging.SLOTS.count + 1):
        engine.inject(f"{direction} {at} never")
        with pytest.raises(SwapTimeoutError):
            if direction == "write":
                swapper.swap_out_many(new)
            else:
                swapper.swap_in_many(tensors)
        engine.inject("")
    if direction == "write":
        swapper.swap_out_many(new)
        tensors = new
    back = swapper.swap_in_many(tensors)
    assert all(torch.equal(each, tensors[key]) for key, each in back.items())


def test_rewriting_that_is_interrupted_anywhere_never_leaves_parts_of_two(
    tmp_path: Path,
) -> None:
    """Every part has a good checksum, so nobody would notice."""
    old = torch.full((3 * SLOT_NBYTES,), 1, dtype=torch.uint8)
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out("k", old)
        count = 0
        new = old + 1
        for point in interrupted_everywhere(lambda: swapper.swap_out("k", new), apart=11):
            try:
                back = swapper.swap_in("k")
                assert bool((back == back[0]).all()), point
            except SwapUsageError:
                pass  # never written
            swapper.swap_out("k", old)
            assert torch.equal(swapper.swap_in("k"), old), point
            count += 1
        assert count > 20


def test_reading_of_parts_that_is_interrupted_anywhere_costs_no_slot(tmp_path: Path) -> None:
    tensors = values(6)
    with TensorSwapper(tmp_path, swap=SwapBlock(timeout_s=5.0)) as swapper:
        swapper.swap_out_many(tensors)
        out = poisoned(tensors)
        for point in interrupted_everywhere(
            lambda: swapper.swap_in_many(tensors, out=out), apart=151
        ):
            back = swapper.swap_in_many(tensors)
            assert all(torch.equal(each, tensors[key]) for key, each in back.items()), point


def test_each_way_out_and_each_way_in_go_together(tmp_path: Path) -> None:
    """What was written as a whole has one sum, and is not to be read in parts without any."""
    tensors = values(7)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with TensorSwapper(tmp_path) as swapper:
        for written in range(2):
            if written:
                swapper.swap_out_many(tensors)
            else:
                for future in [swapper.swap_out_async(*each) for each in tensors.items()]:
                    future.wait()
            back = swapper.swap_in_many(tensors)
            futures = {key: swapper.swap_in_async(key) for key in tensors}
            back_async = {key: future.wait() for key, future in futures.items()}
            swapper.prefetch(tensors)
            prefetched = swapper.swap_in_many(tensors)
            for each in (back, back_async, prefetched):
                assert all(torch.equal(each[key], tensors[key]) for key in tensors)
            assert swapper.stats().verified_nbytes == 3 * (written + 1) * nbytes
        assert swapper.keys() == list(tensors)


def test_slots_count_in_the_budget(tmp_path: Path) -> None:
    with TensorSwapper(tmp_path, swap=SwapBlock(host_memory_nbytes=SLOT_NBYTES)) as swapper:
        swapper.swap_out_many(values(8))
        assert torch.equal(swapper.swap_in("1 of 5000"), values(8)["1 of 5000"])
    small = SwapBlock(host_memory_nbytes=SLOT_NBYTES - 1)
    with TensorSwapper(tmp_path, swap=small) as swapper, pytest.raises(SwapBudgetError) as raised:
        swapper.swap_out("a", torch.ones(3))
    assert raised.value.smallest_nbytes == SLOT_NBYTES


@given(st.lists(st.integers(0, 4 * SLOT_NBYTES), max_size=40), st.booleans(),
       st.sampled_from([4096, 8192]))
def test_every_byte_has_one_place_in_one_slot(
    sizes: list[int], is_split: bool, alignment_nbytes: int
) -> None:
    transits = [
        Transit(str(n), str(n), TensorSpec(torch.uint8, (size,), (1,)), torch.empty(1))
        for n, size in enumerate(sizes)
    ]
    moved: dict[str, list[Piece]] = {str(n): [] for n in range(len(sizes))}
    for is_aligned, pieces in packed(transits, SLOT_NBYTES, alignment_nbytes, is_split=is_split):
        end = 0
        for piece in pieces:
            assert piece.place >= end and piece.place % alignment_nbytes == 0
            end = piece.place + piece.nbytes
            assert is_aligned == (is_split and piece.nbytes % alignment_nbytes == 0)
            moved[piece.transit.key].append(piece)
        assert pieces and end <= SLOT_NBYTES
        assert len(pieces) == 1 or all(each.nbytes == each.transit.nbytes for each in pieces)
    for transit in transits:
        reached = 0
        for piece in moved[transit.key]:
            assert piece.first_byte == reached and piece.nbytes > 0
            assert piece.is_last == (reached + piece.nbytes == transit.nbytes)
            reached += piece.nbytes
        assert reached == transit.nbytes
