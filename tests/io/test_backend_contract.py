"""One suite that every backend must pass, the skeleton and the fault backend included."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.errors import SwapReadError, SwapUsageError
from nvmeswap.io import DirectMode, Engine, File, Lane, padded_nbytes

POISON, GUARD = 0xAA, 0x5C
GUARD_NBYTES = 4096
ODD_SIZES = (0, 1, 3, 511, 512, 513, 4095, 4096, 4097, (1 << 20) + 1, 3 * (1 << 20) - 7)
BACKENDS = ("uring", "aio", "posix", "skeleton", "fault")

MakeBytes = Callable[..., torch.Tensor]


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(backend=request.param, queue_depth=8) as engine:
        yield engine


@pytest.fixture(params=(DirectMode.PREFER, DirectMode.OFF), ids=("direct", "buffered"))
def file(request: pytest.FixtureRequest, engine: Engine, swap_path: Path) -> Iterator[File]:
    file = engine.open(swap_path, direct=request.param)
    yield file
    file.close()


def guarded(nbytes: int, misaligned_by: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of guard bytes, and a poison-filled destination inside it."""
    memory = torch.full((nbytes + 2 * GUARD_NBYTES + 4096,), GUARD, dtype=torch.uint8)
    start = GUARD_NBYTES + (-memory.data_ptr()) % 4096 + misaligned_by
    inside = memory[start : start + nbytes]
    inside.fill_(POISON)
    return memory, inside


def assert_guards_intact(memory: torch.Tensor, inside: torch.Tensor) -> None:
    start = inside.data_ptr() - memory.data_ptr()
    assert bool((memory[:start] == GUARD).all())
    assert bool((memory[start + inside.numel() :] == GUARD).all())


@pytest.mark.parametrize("misaligned_by", (0, 1, 64, 512))
def test_reader_of_any_size_and_address_gets_exactly_what_was_written(
    engine: Engine, file: File, random_bytes: MakeBytes, misaligned_by: int
) -> None:
    """Else odd tensors come back with a lost tail, or overwrite their neighbours in memory.

    field case A01, A02, A10
    """
    for nbytes in ODD_SIZES:
        source = random_bytes(nbytes, misaligned_by)
        before = source.clone()
        engine.write(file, 8192, source).wait()
        memory, destination = guarded(nbytes, misaligned_by)
        engine.read(file, 8192, destination).wait()
        assert torch.equal(destination, before), nbytes
        assert torch.equal(source, before), nbytes
        assert_guards_intact(memory, destination)


def test_bf16_tensor_of_odd_length_comes_back_bit_for_bit(
    engine: Engine, file: File
) -> None:
    """Else the partition read back is shorter than the tensor.  field case A01"""
    for elements in (1, 3, 511, 512, 513, 262_143, 1_441_200):
        source = torch.randn(elements).to(torch.bfloat16)
        destination = torch.full_like(source, -7)
        engine.write(file, 0, source).wait()
        engine.read(file, 0, destination).wait()
        assert torch.equal(source, destination), elements


def test_writer_between_neighbours_leaves_both_intact(
    engine: Engine, file: File, random_bytes: MakeBytes
) -> None:
    """Else the tail of one extent overwrites the next.  field case A09"""
    first, middle, last = random_bytes(8192), random_bytes(12_000), random_bytes(4096, 1)
    for offset_bytes, source in ((0, first), (8192, middle), (20480, last)):
        engine.write(file, offset_bytes, source).wait()
    new = random_bytes(5000, 3)
    engine.write(file, 8192, new).wait()
    for offset_bytes, expected in ((0, first), (8192, new), (20480, last)):
        destination = torch.full_like(expected, POISON)
        engine.read(file, offset_bytes, destination).wait()
        assert torch.equal(destination, expected)


@pytest.mark.parametrize("offset_bytes", ((1 << 31) - 4096, 1 << 31, (1 << 32) + 4096))
def test_writer_beyond_32_bits_of_offset_reads_the_same_back(
    engine: Engine, file: File, swap_path: Path, random_bytes: MakeBytes, offset_bytes: int
) -> None:
    """Else large models wrap round to the start of the file.  field case A05"""
    os.truncate(swap_path, offset_bytes + 12288)
    source, destination = random_bytes(8192), torch.full((8192,), POISON, dtype=torch.uint8)
    engine.write(file, offset_bytes, source).wait()
    engine.read(file, offset_bytes, destination).wait()
    assert torch.equal(source, destination)


def test_submitter_of_more_than_the_queue_holds_gets_all_of_it(
    engine: Engine, file: File, random_bytes: MakeBytes
) -> None:
    """Else requests beyond the queue depth are dropped, or hang.  field case H04, H05"""
    sources = [random_bytes(4096 + i) for i in range(300)]
    writes = [engine.write(file, i * 8192, t, lane=Lane.WRITEBACK) for i, t in enumerate(sources)]
    for request in writes:
        request.wait()
    copies = [torch.full_like(source, POISON) for source in sources]
    requests = [engine.read(file, i * 8192, t, lane=Lane.PREFETCH) for i, t in enumerate(copies)]
    for request in reversed(requests):
        request.wait()
        assert request.done()
    assert all(map(torch.equal, sources, copies))
    stats = engine.stats()
    assert (stats.request_count, stats.in_flight_count, stats.error_count) == (600, 0, 0)


def test_reader_past_the_end_gets_an_error_with_the_numbers(
    engine: Engine, file: File, swap_path: Path
) -> None:
    """Else stale bytes are taken for weights.  field case A07"""
    os.truncate(swap_path, 10_000)
    destination = torch.full((16384,), POISON, dtype=torch.uint8)
    with pytest.raises(SwapReadError) as raised:
        engine.read(file, 0, destination).wait()
    assert raised.value.path == swap_path
    assert (raised.value.offset_bytes, raised.value.wanted_nbytes) == (0, 16384)
    assert raised.value.errno is None


def test_reader_up_to_an_unpadded_end_succeeds(
    engine: Engine, file: File, swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else a file that isn't padded can't be read although every wanted byte is there."""
    source = random_bytes(5000)
    swap_path.write_bytes(source.numpy().tobytes())
    memory, destination = guarded(5000)
    engine.read(file, 0, destination).wait()
    assert torch.equal(source, destination)
    assert_guards_intact(memory, destination)


def test_reader_under_a_storm_of_signals_ends_with_exact_data(
    engine: Engine, file: File, random_bytes: MakeBytes
) -> None:
    """Else a profiler's timer, or Ctrl-C handled by the user, hangs or corrupts.  field case H06"""
    source = random_bytes(256 * 4096)
    engine.write(file, 0, source).wait()
    fired = itertools.count()
    before = signal.signal(signal.SIGALRM, lambda *_: next(fired))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        copies = [torch.full((4096,), POISON, dtype=torch.uint8) for _ in range(256)]
        for request in [engine.read(file, i * 4096, copy) for i, copy in enumerate(copies)]:
            request.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert torch.equal(torch.cat(copies), source)


def test_caller_with_a_useless_buffer_or_offset_is_told_at_once(engine: Engine, file: File) -> None:
    """Else a strided view would be read into the wrong elements."""
    square = torch.zeros(64, 64)
    for offset_bytes, buffer in ((0, square.t()), (-4096, square), ((1 << 63) - 1, square)):
        with pytest.raises(SwapUsageError):
            engine.read(file, offset_bytes, buffer)
    with pytest.raises(SwapUsageError):
        engine.read(file, 0, torch.empty(4, device="meta"))
    if file.direct:
        with pytest.raises(SwapUsageError):
            engine.read(file, 100, square)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), backend=st.sampled_from(BACKENDS))
def test_any_mix_of_sizes_depths_and_blocks_comes_back_equal(
    data: st.DataObject, backend: str
) -> None:
    """Else some combination nobody thought of loses bytes where blocks meet."""
    sizes = data.draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=12))
    with (
        tempfile.NamedTemporaryFile(prefix="nvmeswap-test-") as scratch,
        Engine(
            backend=backend,
            queue_depth=data.draw(st.integers(1, 9)),
            block_nbytes=4096 * data.draw(st.integers(1, 5)),
        ) as engine,
    ):
        scratch.truncate(len(sizes) * 40_960)
        file = engine.open(Path(scratch.name))
        sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
        guards = [guarded(nbytes, data.draw(st.integers(0, 513))) for nbytes in sizes]
        # Some of them neighbours in the file, in any order.
        places, at = [], 0
        for nbytes in sizes:
            places.append(at)
            at += padded_nbytes(nbytes, 4096) + data.draw(st.sampled_from((0, 0, 4096)))
        order = data.draw(st.permutations(range(len(sizes))))
        engine.write_many(
            file, [places[i] for i in order], [sources[i] for i in order], lane=Lane.WRITEBACK,
        ).wait()
        engine.read_many(
            file, [places[i] for i in order], [guards[i][1] for i in order],
        ).wait()
        for source, (memory, destination) in zip(sources, guards, strict=True):
            assert torch.equal(source, destination)
            assert_guards_intact(memory, destination)
        file.close()
