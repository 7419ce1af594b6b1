"""Many small transfers in one call: moved together where they are neighbours, failing alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xxhash

from nvmeswap.errors import SwapCancelledError, SwapReadError, SwapUsageError, SwapWriteError
from nvmeswap.io import Engine, Lane
from nvmeswap.io.digest import CHUNK_NBYTES, digest, digests

POISON = 0xAA


def random_pieces(sizes: Sequence[int]) -> list[torch.Tensor]:
    """No two alike; the heap's addresses, so most are not aligned for direct I/O."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


def poisoned(count: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes,), POISON, dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("nbytes", (4096, 5000))
@pytest.mark.parametrize("backend", ("uring", "aio", "posix", "skeleton"))
def test_neighbours_share_blocks(
    swap_path: Path, backend: str, nbytes: int
) -> None:
    """Else thousands of small tensors take a trip to the drive each."""
    os.truncate(swap_path, 256 * 8192)
    places = [i * (4096 if nbytes == 4096 else 8192) for i in range(256)]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).tolist()
    sources, copies = random_pieces([nbytes] * 256), poisoned(256, nbytes)
    with Engine(backend=backend) as engine:
        file = engine.open(swap_path)
        engine.write_many(file, [places[i] for i in order], [sources[i] for i in order]).wait()
        written_count = engine.stats().block_count
        engine.read_many(file, [places[i] for i in order], [copies[i] for i in order]).wait()
        stats = engine.stats()
        assert all(map(torch.equal, sources, copies))
        # 64 vectors a block at most; a piece of odd length takes two.
        assert max(written_count, stats.block_count - written_count) <= 256 * 2 // 64 + 1
        assert (stats.request_count, stats.lanes["demand"].count) == (2, 2)
        assert 0 < stats.lanes["demand"].p50_s <= stats.lanes["demand"].max_s
        file.close()


def test_small_gaps_are_read_over_and_never_written(swap_path: Path) -> None:
    """Else every other tensor costs a trip to the drive each, or its neighbour is lost."""
    whole = random_pieces([128 * 4096])[0]
    places = range(0, 128 * 4096, 8192)
    with Engine(backend="uring") as engine:
        file = engine.open(swap_path)
        engine.write(file, 0, whole).wait()
        before = engine.stats().block_count
        copies = poisoned(64, 4096)
        engine.read_many(file, places, copies).wait()
        assert engine.stats().block_count - before <= 64 // 32 + 1  # a gap takes a vector, too
        for place, copy in zip(places, copies, strict=True):
            assert torch.equal(copy, whole[place : place + 4096])
        sources = random_pieces([3000] * 64)
        engine.write_many(file, places, sources).wait()
        got = poisoned(1, 128 * 4096)[0]
        engine.read(file, 0, got).wait()
        for place, source in zip(places, sources, strict=True):
            assert torch.equal(got[place : place + 3000], source)
            assert torch.equal(got[place + 4096 : place + 8192], whole[place + 4096 : place + 8192])
        file.close()


def test_failed_block_of_many_fails_only_the_piece_that_is_bad(
    swap_path: Path
) -> None:
    """Else one bad sector loses its neighbours too.  field case H08"""
    sources, copies = random_pieces([4096] * 8), poisoned(8, 4096)
    places = [i * 4096 for i in range(8)]
    with Engine(fault_script="") as engine:
        file = engine.open(swap_path)
        engine.write_many(file, places, sources).wait()
        # The block of all eight, then the third of them alone.
        engine.inject("read 1 errno 5; read 4 errno 5")
        request = engine.read_many(file, places, copies)
        failed = request.failed()
        assert list(failed) == [2]
        assert isinstance(failed[2], SwapReadError)
        assert (failed[2].offset_bytes, failed[2].errno) == (8192, 5)
        with pytest.raises(SwapReadError):
            request.wait()
        for i in {*range(8)} - {2}:
            assert torch.equal(copies[i], sources[i])
        engine.read_many(file, places, copies).wait()
        assert torch.equal(copies[2], sources[2])
        file.close()


@pytest.mark.parametrize("moved_nbytes", (4096, 5000, 12288, 20480))
def test_short_block_of_many_goes_on_where_it_stopped(
    swap_path: Path, moved_nbytes: int
) -> None:
    """Else the pieces behind a short transfer keep stale bytes.  field case A07"""
    sizes = (4096, 6000, 100, 8192, 5000)
    places = (0, 4096, 12288, 16384, 24576)
    sources = random_pieces(sizes)
    copies = [torch.full((nbytes,), POISON, dtype=torch.uint8) for nbytes in sizes]
    script = f"read 1 short {moved_nbytes}; write 1 short {moved_nbytes}; write 2 short 4096"
    with Engine(fault_script=script) as engine:
        file = engine.open(swap_path)
        engine.write_many(file, places, sources).wait()
        engine.read_many(file, places, copies).wait()
        assert all(map(torch.equal, sources, copies))
        file.close()


def test_cancelled_request_drops_what_has_not_gone_to_the_drive(
    swap_path: Path
) -> None:
    """Else a prefetch that nobody wants any more holds up a demand."""
    source = random_pieces([65536])[0]
    with Engine(fault_script="", queue_depth=1) as engine:
        file = engine.open(swap_path)
        engine.write(file, 0, source).wait()
        engine.inject("read 1 delay 50")
        first, dropped = poisoned(2, 65536)
        under_way = engine.read(file, 0, first, lane=Lane.PREFETCH)
        waiting = engine.read(file, 0, dropped, lane=Lane.PREFETCH)
        waiting.cancel()
        with pytest.raises(SwapCancelledError):
            waiting.wait()
        assert (dropped == POISON).all()
        under_way.cancel()
        under_way.wait()  # it had gone
        assert torch.equal(first, source)
        under_way.cancel()  # no effect
        assert engine.stats().in_flight_count == 0
        file.close()


def test_cancelled_batch_says_which_pieces_were_moved(
    swap_path: Path
) -> None:
    """Else its owner can't tell good from stale."""
    sources, copies = random_pieces([4096] * 6), poisoned(6, 4096)
    places = [i * 8192 for i in range(6)]
    with Engine(fault_script="", queue_depth=2) as engine:
        file = engine.open(swap_path)
        engine.write_many(file, places, sources).wait()
        engine.inject("read * delay 50")
        request = engine.read_many(file, places, copies)
        request.cancel()
        failed = request.failed()
        assert all(isinstance(error, SwapCancelledError) for error in failed.values())
        for i, (source, copy) in enumerate(zip(sources, copies, strict=True)):
            assert (copy == POISON).all() if i in failed else torch.equal(source, copy)
        file.close()


def test_batch_with_one_useless_piece_starts_nothing(swap_path: Path) -> None:
    """Else half of a call that raised is under way."""
    good = torch.zeros(4096, dtype=torch.uint8)
    with Engine() as engine:
        file = engine.open(swap_path)
        for offsets, buffers in (
            ((0, 100), (good, good)),
            ((0, 4096), (good, good[::2])),
            ((0,), (good, good)),
            ((0, -4096), (good, good)),
            ((0, 1 << 63), (good, good)),
        ):
            with pytest.raises(SwapUsageError):
                engine.write_many(file, offsets, buffers)
        assert engine.stats().request_count == 0
        file.close()


def test_full_disk_in_a_batch_names_the_pieces_that_found_no_room(
    swap_path: Path
) -> None:
    """Else the others are thrown away with them."""
    places = [i * 8192 for i in range(4)]
    with Engine(fault_script="write 3 errno 28; write 4 errno 5") as engine:
        file = engine.open(swap_path)
        failed = engine.write_many(file, places, random_pieces([4096] * 4)).failed()
        assert {index: error.errno for index, error in failed.items()} == {2: 28, 3: 5}
        assert all(isinstance(error, SwapWriteError) for error in failed.values())
        file.close()


def test_digests_are_those_of_the_xxhash_package() -> None:
    """Else sums on disk can't be checked by anything else."""
    buffers = random_pieces((0, 1, 240, 4096, 1_000_003))
    expected = [xxhash.xxh3_64_intdigest(each.numpy().data) for each in buffers]
    assert digests(buffers) == expected == [digest(each) for each in buffers]
    long = random_pieces([2 * CHUNK_NBYTES + 5])[0]
    total = 0
    for begin in range(0, long.nbytes, CHUNK_NBYTES):
        chunk = long[begin : begin + CHUNK_NBYTES].numpy().data
        total = xxhash.xxh3_64_intdigest(chunk, seed=total)
    assert digest(long) == total == digests([long])[0]
