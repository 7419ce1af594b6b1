"""Places in a file: disjoint, aligned, reused; and what is known of the bytes in them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.store.extents import Extent, ExtentAllocator
from nvmeswap.store.written import WrittenRanges

ALIGNMENT = 4096


@given(st.lists(st.tuples(st.integers(0, 5 * ALIGNMENT), st.booleans(), st.integers(0, 99))))
def test_extents_whatever_is_freed_are_disjoint_aligned_and_below_the_end(
    calls: list[tuple[int, bool, int]]
) -> None:
    """Two tensors in one place: the later write destroys the earlier one silently."""
    allocator = ExtentAllocator(ALIGNMENT)
    held: list[Extent] = []
    for nbytes, frees, index in calls:
        if frees and held:
            allocator.free(held.pop(index % len(held)))
        else:
            extent = allocator.allocate(nbytes)
            assert extent.nbytes == nbytes <= extent.padded_nbytes < nbytes + ALIGNMENT
            held.append(extent)
        for each in held:
            assert each.offset_bytes % ALIGNMENT == 0 and each.padded_nbytes % ALIGNMENT == 0
            assert each.end_bytes <= allocator.end_bytes
        places = sorted((each.offset_bytes, each.end_bytes) for each in held if each.nbytes)
        for (_, end), (following, _) in itertools.pairwise(places):
            assert end <= following
    for extent in held:
        allocator.free(extent)
    assert allocator.end_bytes == 0


@given(st.lists(st.integers(1, 5 * ALIGNMENT), min_size=1), st.randoms(use_true_random=False))
def test_extents_when_freed_in_any_order_leave_one_hole(sizes: list[int], random: object) -> None:
    """Holes that stay apart make a file grow for ever, though it is half empty."""
    allocator = ExtentAllocator(ALIGNMENT)
    extents = [allocator.allocate(nbytes) for nbytes in sizes]
    last = allocator.allocate(1)
    end_bytes = allocator.end_bytes
    random.shuffle(extents)  # type: ignore[attr-defined]
    for extent in extents:
        allocator.free(extent)
    assert allocator.allocate(sum(each.padded_nbytes for each in extents)).offset_bytes == 0
    assert allocator.end_bytes == end_bytes == last.end_bytes


@given(st.lists(st.tuples(st.integers(0, 5 * ALIGNMENT), st.booleans(), st.integers(0, 99))))
def test_extents_equal_a_plain_list_of_free_blocks(calls: list[tuple[int, bool, int]]) -> None:
    """A hole that is not found, or not joined, makes a file grow although there is room in it."""
    allocator = ExtentAllocator(ALIGNMENT)
    held: list[Extent] = []
    free: list[bool] = []  # block by block, up to the end
    for nbytes, frees, index in calls:
        if frees and held:
            extent = held.pop(index % len(held))
            allocator.free(extent)
            place = slice(extent.offset_bytes // ALIGNMENT, extent.end_bytes // ALIGNMENT)
            free[place] = [True] * (extent.padded_nbytes // ALIGNMENT)
            while free and free[-1]:
                free.pop()
        elif nbytes:
            blocks = -(-nbytes // ALIGNMENT)
            runs = [(len(list(run)), is_free) for is_free, run in itertools.groupby(free)]
            fitting = [length for length, is_free in runs if is_free and length >= blocks]
            extent = allocator.allocate(nbytes)
            first = extent.offset_bytes // ALIGNMENT
            if fitting:  # the smallest that fits, from its beginning
                hole = list(itertools.takewhile(bool, free[first:]))
                assert len(hole) == min(fitting) and (first == 0 or not free[first - 1])
                free[first : first + blocks] = [False] * blocks
            else:
                assert first == len(free)
                free += [False] * blocks
            held.append(extent)
        assert allocator.end_bytes == len(free) * ALIGNMENT


def test_extents_in_fresh_space_are_neighbours_in_the_order_of_the_calls() -> None:
    """Small tensors of one batch are moved together only where they lie side by side."""
    allocator = ExtentAllocator(ALIGNMENT)
    extents = [allocator.allocate(nbytes) for nbytes in (1, 5000, 4096, 0, 77)]
    places = [(each.offset_bytes, each.end_bytes) for each in extents if each.nbytes]
    assert places == [(0, 4096), (4096, 12288), (12288, 16384), (16384, 20480)]


def test_extent_when_freed_twice_is_our_bug() -> None:
    """A place that is free twice is given to two tensors."""
    allocator = ExtentAllocator(ALIGNMENT)
    first, _ = allocator.allocate(1), allocator.allocate(1)
    allocator.free(first)
    with pytest.raises(AssertionError):
        allocator.free(first)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 28), st.booleans()), max_size=25))
def test_written_ranges_whatever_is_written_know_each_byte(
    calls: list[tuple[int, int, bool]]
) -> None:
    """A stale sum fails a good read; a forgotten one lets a bad read pass."""
    ranges = WrittenRanges(28)
    last_write: dict[int, int] = {}  # byte to the write that made it
    spans: dict[int, tuple[int, int]] = {}
    for number, (first, length, succeeds) in enumerate(calls):
        end = min(first + length, 28)
        if succeeds:
            ranges.add(first, end, number)
            spans[number] = (first, end)
            last_write |= dict.fromkeys(range(first, end), number)
        else:
            ranges.remove(first, end)
            for byte in range(first, end):
                last_write.pop(byte, None)
    whole = {
        number for number, (first, end) in spans.items()
        if all(last_write.get(byte) == number for byte in range(first, end))
    }
    known = {digest for _, _, digest in ranges.inside(0, 99) if digest is not None}
    assert known == whole
    for first in range(28):
        for end in range(first, 29):
            written = all(byte in last_write for byte in range(first, end))
            assert ranges.covers(first, end) == written
