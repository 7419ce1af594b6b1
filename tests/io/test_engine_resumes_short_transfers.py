"""A transfer that moved less than asked, or was refused for now, is carried on to the end."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapReadError, SwapWriteError
from nvmeswap.io import DirectMode, Engine

MakeBytes = Callable[..., torch.Tensor]


def round_trip(
    path: Path, source: torch.Tensor, script: str, direct: DirectMode, **options: int
) -> int:
    """Writes and reads under the script, compares, and returns how many blocks were retried."""
    with Engine(backend="aio", fault_script=script, **options) as engine:
        file = engine.open(path, direct=direct)
        engine.write(file, 0, source).wait()
        destination = torch.full_like(source, 0xAA)
        engine.read(file, 0, destination).wait()
        assert torch.equal(source, destination)
        return engine.stats().retry_count


@pytest.mark.parametrize("direct", (DirectMode.PREFER, DirectMode.OFF))
@pytest.mark.parametrize("short_nbytes", (4096, 10_000, 65_535))
def test_reader_of_a_short_transfer_gets_the_rest_too(
    swap_path: Path, random_bytes: MakeBytes, direct: DirectMode, short_nbytes: int
) -> None:
    """Else the end of the buffer keeps stale bytes and the model degenerates.  field case A07"""
    source = random_bytes(65_536)
    script = f"read 1 short {short_nbytes}; write 1 short {short_nbytes}"
    assert round_trip(swap_path, source, script, direct) == 2


def test_reader_whose_every_transfer_is_cut_to_seven_bytes_still_gets_all(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else whatever lies past the largest transfer is truncated silently.  field case A08"""
    script = "any * short 7"
    assert round_trip(swap_path, random_bytes(96), script, DirectMode.OFF) == 26


def test_bounced_reader_of_short_transfers_gets_all(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else resuming mixes up the bounce buffer's place and the file's."""
    script = "any * short 4096"
    assert round_trip(swap_path, random_bytes(20_001, 1), script, DirectMode.PREFER) == 8


@pytest.mark.parametrize("code", (4, 11))
def test_reader_that_is_told_to_try_again_tries_again(
    swap_path: Path, random_bytes: MakeBytes, code: int
) -> None:
    """Else XFS's EAGAIN, or a signal's EINTR, fails a healthy run."""
    script = f"read 1 errno {code}; read 2 errno {code}; write 1 errno {code}"
    assert round_trip(swap_path, random_bytes(8192), script, DirectMode.PREFER) == 3


def test_submitter_to_a_busy_kernel_loses_no_request(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else the refused rest of a batch is dropped and its waiter hangs.  field case H04, H05"""
    script = "write 4 busy; write 5 busy; read 1 busy; read 3 busy"
    with Engine(fault_script=script, queue_depth=4) as engine:
        file = engine.open(swap_path)
        sources = [random_bytes(4096 + i) for i in range(8)]
        copies = [torch.empty_like(source) for source in sources]
        engine.read_many(file, [], []).wait()
        for request in [engine.write(file, i * 8192, t) for i, t in enumerate(sources)]:
            request.wait()
        engine.read_many(file, [i * 8192 for i in range(8)], copies).wait()
        assert all(map(torch.equal, sources, copies))


def test_waiter_on_a_kernel_that_is_always_busy_gets_an_error(swap_path: Path) -> None:
    """Else retrying goes on for ever and the step hangs."""
    for script in ("read * errno 11", "read * busy"):
        with Engine(fault_script=script) as engine:
            file = engine.open(swap_path)
            with pytest.raises(SwapReadError) as raised:
                engine.read(file, 0, torch.empty(4096, dtype=torch.uint8)).wait()
            assert raised.value.errno == 11


def test_waiter_on_a_transfer_without_progress_gets_an_error(swap_path: Path) -> None:
    """Else the loop that resumes never ends."""
    with Engine(fault_script="write 1 short 0; read 1 short 100") as engine:
        file = engine.open(swap_path)
        with pytest.raises(SwapWriteError):
            engine.write(file, 0, torch.ones(8192, dtype=torch.uint8)).wait()
        with pytest.raises(SwapReadError):
            engine.read(file, 0, torch.ones(8192, dtype=torch.uint8)).wait()


@pytest.mark.slow
def test_reader_of_more_than_two_gib_gets_all_of_it(swap_path: Path) -> None:
    """Else a 32-bit count turns negative, or the kernel's limit truncates.  field case A06, A08"""
    nbytes = (1 << 31) + 4097
    os.truncate(swap_path, nbytes + 4095)
    with Engine() as engine:
        file = engine.open(swap_path)
        mark = torch.arange(4097, dtype=torch.int64).to(torch.uint8)
        engine.write(file, 1 << 31, mark).wait()
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        destination = torch.frombuffer(memory, dtype=torch.uint8)
        engine.read(file, 0, destination).wait()
        assert torch.equal(destination[1 << 31 :], mark)
        assert engine.stats().block_count == 2048 + 2


def test_reader_that_is_told_busy_tries_again(
    swap_path: Path, random_bytes: Callable[..., torch.Tensor]
) -> None:
    """A temporary shortage is not a broken device.  field case I06"""
    with Engine(fault_script=f"read 1 errno {errno.EBUSY}; write 1 errno {errno.EBUSY}") as engine:
        file = engine.open(swap_path)
        source = random_bytes(8192)
        engine.write(file, 0, source).wait()
        destination = torch.full_like(source, 0xAA)
        engine.read(file, 0, destination).wait()
        assert torch.equal(source, destination)


def test_reader_that_is_told_busy_for_ever_gets_an_error(swap_path: Path) -> None:
    """field case I06: and in bounded time"""
    with Engine(fault_script=f"read * errno {errno.EBUSY}") as engine:
        with pytest.raises(SwapReadError) as raised:
            engine.read(engine.open(swap_path), 0, torch.empty(4096, dtype=torch.uint8)).wait()
        assert raised.value.errno == errno.EBUSY
        assert engine.stats().retry_count > 1
