"""A failed transfer fails its own request, with the facts, and nothing else."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import (
    SwapClosedError,
    SwapConfigError,
    SwapPathError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.io import Engine, Lane

MakeBytes = Callable[..., torch.Tensor]
BLOCK_NBYTES = 8192


def test_waiter_for_a_failed_read_gets_it_and_its_neighbours_do_not(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else one bad sector kills the I/O thread and every later step hangs.  field case H08"""
    with Engine(fault_script="read 2 errno 5") as engine:
        file = engine.open(swap_path)
        source = random_bytes(4096)
        engine.write(file, 4096, source).wait()
        copies = [torch.empty_like(source) for _ in range(4)]
        first, second, third = (engine.read(file, 4096, copy) for copy in copies[:3])
        first.wait()
        third.wait()
        for _ in range(2):
            with pytest.raises(SwapReadError) as raised:
                second.wait()
            assert (raised.value.errno, raised.value.path) == (errno.EIO, swap_path)
            assert (raised.value.offset_bytes, raised.value.wanted_nbytes) == (4096, 4096)
        assert second.done()
        engine.read(file, 4096, copies[3]).wait()
        assert torch.equal(copies[3], source)
        assert engine.stats().error_count == 1


def test_request_with_a_failed_block_ends_only_when_no_block_is_in_flight(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else the buffer is given back while the kernel still writes into it."""
    script = "read 2 errno 5; read 1 delay 50; read 3 delay 50"
    with Engine(fault_script=script, block_nbytes=BLOCK_NBYTES, queue_depth=4) as engine:
        file = engine.open(swap_path)
        source = random_bytes(3 * BLOCK_NBYTES)
        engine.write(file, 0, source).wait()
        destination = torch.full_like(source, 0xAA)
        with pytest.raises(SwapReadError) as raised:
            engine.read(file, 0, destination).wait()
        assert raised.value.got_nbytes == 2 * BLOCK_NBYTES
        for block in (0, 2):
            place = slice(block * BLOCK_NBYTES, (block + 1) * BLOCK_NBYTES)
            assert torch.equal(destination[place], source[place])


def test_large_request_after_its_first_failure_submits_nothing_more(swap_path: Path) -> None:
    """Else a full disk is hammered with the rest of a 10 GB write before anyone hears of it."""
    with Engine(fault_script="write 1 errno 5", block_nbytes=4096, queue_depth=2) as engine:
        file = engine.open(swap_path)
        with pytest.raises(SwapWriteError):
            engine.write(file, 0, torch.zeros(1 << 20, dtype=torch.uint8)).wait()
        assert engine.stats().block_count < 256
        # Its lane must go on working for others.
        engine.write(file, 0, torch.zeros(1 << 20, dtype=torch.uint8)).wait()


def test_failed_request_waiting_in_a_lane_leaves_its_neighbours_in_place(swap_path: Path) -> None:
    """Else taking the failed one out of the queue loses the requests behind it."""
    with Engine(fault_script="any 3 errno 5", block_nbytes=4096, queue_depth=2) as engine:
        file = engine.open(swap_path)
        chunk = torch.zeros(64 << 10, dtype=torch.uint8)
        requests = [engine.write(file, i << 16, chunk, lane=Lane(i % 3)) for i in range(9)]
        failed = 0
        for request in requests:
            try:
                request.wait()
            except SwapWriteError:
                failed += 1
        assert failed == 1
        assert engine.stats().in_flight_count == 0


@pytest.mark.parametrize("code", (errno.ENOSPC, errno.EDQUOT))
def test_writer_to_a_full_disk_is_told_how_much_is_free(swap_path: Path, code: int) -> None:
    """Else the message is a bare number and the process dies."""
    with Engine(fault_script=f"write 1 errno {code}") as engine:
        file = engine.open(swap_path)
        with pytest.raises(SwapSpaceError) as raised:
            engine.write(file, 0, torch.zeros(8192, dtype=torch.uint8)).wait()
        assert raised.value.errno == code
        assert raised.value.wanted_nbytes == 8192
        assert raised.value.got_nbytes is not None
        engine.write(file, 0, torch.zeros(8192, dtype=torch.uint8)).wait()


@pytest.fixture
def tiny_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("backend", ("aio", "posix"))
def test_writer_to_a_really_full_disk_gets_an_error_and_frees_space_and_goes_on(
    tiny_filesystem: Path, backend: str
) -> None:
    """Else tmpfs's short write before ENOSPC is taken for success."""
    path = tiny_filesystem / "a.swp"
    path.touch()
    with Engine(backend=backend) as engine:
        file = engine.open(path)
        with pytest.raises(SwapSpaceError):
            engine.write(file, 0, torch.ones(3 << 20, dtype=torch.uint8)).wait()
        with path.open("r+b") as stream:
            stream.truncate(0)
        engine.write(file, 0, torch.ones(512 << 10, dtype=torch.uint8)).wait()
        file.close()


def test_reader_of_a_flipped_bit_finds_the_fault_backend_does_flip(swap_path: Path) -> None:
    """Else tests of checksums above this floor prove nothing."""
    with Engine(fault_script="read 1 flip") as engine:
        file = engine.open(swap_path)
        destination = torch.zeros(4096, dtype=torch.uint8)
        engine.read(file, 0, destination).wait()
        assert int(destination.sum()) == 1


def test_tester_who_injects_later_starts_counting_then(swap_path: Path) -> None:
    """Else faults can't be aimed at a step after the set-up."""
    with Engine(backend="fault") as engine:
        file = engine.open(swap_path)
        chunk = torch.zeros(4096, dtype=torch.uint8)
        engine.write(file, 0, chunk).wait()
        engine.inject("write 1 errno 5")
        with pytest.raises(SwapWriteError):
            engine.write(file, 0, chunk).wait()
        with pytest.raises(SwapUsageError):
            engine.inject("write one errno 5")
    with Engine() as engine, pytest.raises(SwapUsageError):
        engine.inject("")


@pytest.mark.parametrize(
    "options",
    ({"backend": "uring?"}, {"fault_script": "read 1 explode"}, {"fault_script": "read 1 short"}),
)
def test_opener_of_an_unknown_backend_or_script_is_told(options: dict[str, str]) -> None:
    """Else a typing error silently runs something else."""
    with pytest.raises(SwapConfigError) as raised:
        Engine(**options)
    assert raised.value.cause


@pytest.mark.parametrize(
    "options", ({"block_nbytes": 1000}, {"block_nbytes": 1 << 31}, {"queue_depth": 0})
)
def test_opener_with_a_size_out_of_range_is_told(options: dict[str, int]) -> None:
    """Else the C code would cut blocks that no kernel accepts."""
    with pytest.raises(SwapUsageError):
        Engine(**options)


def test_opener_of_a_missing_file_or_a_bad_alignment_is_told(swap_path: Path) -> None:
    """Else the first read fails instead, far from the cause."""
    with Engine() as engine:
        with pytest.raises(SwapPathError) as raised:
            engine.open(swap_path.parent / "missing.swp")
        assert raised.value.errno == errno.ENOENT
        with pytest.raises(SwapUsageError):
            engine.open(swap_path, offset_alignment_nbytes=1000)
        with pytest.raises(SwapUsageError):
            engine.open(swap_path, memory_alignment_nbytes=8192)


def test_caller_after_close_is_told_that_it_is_closed(swap_path: Path) -> None:
    """Else it would touch freed memory."""
    engine = Engine()
    file = engine.open(swap_path)
    request = engine.write(file, 0, torch.zeros(4096, dtype=torch.uint8))
    engine.close()
    engine.close()
    assert request.done()
    request.wait()
    calls = (
        engine.stats, lambda: engine.read(file, 0, torch.zeros(1)), lambda: engine.open(swap_path),
    )
    for call in calls:
        with pytest.raises(SwapClosedError):
            call()
    file.close()
    file.close()
    with Engine() as other, pytest.raises(SwapClosedError):
        other.read(file, 0, torch.zeros(1))
