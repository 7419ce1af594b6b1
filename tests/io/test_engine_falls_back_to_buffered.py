"""Where direct I/O is refused, data stays right, counters say so, and the user hears it once."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapPathError, SwapWriteError
from nvmeswap.io import BufferedFallbackWarning, DirectMode, Engine

MakeBytes = Callable[..., torch.Tensor]
TOTAL_NBYTES = 8 << 20


@pytest.fixture
def refuse_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """open() as on a filesystem without O_DIRECT."""
    real_open = os.open

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def test_writer_on_a_direct_file_sees_direct_bytes_only(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else "direct" is claimed while the page cache grows.  field case A11"""
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        file = engine.open(swap_path, direct=DirectMode.REQUIRE)
        engine.write(file, 0, random_bytes(TOTAL_NBYTES)).wait()
        stats = engine.stats()
    assert file.direct
    assert (stats.write_direct_nbytes, stats.write_buffered_nbytes) == (TOTAL_NBYTES, 0)
    assert stats.bounced_nbytes == 0


def test_writer_on_unaligned_memory_stays_direct_through_a_bounce(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else an unaligned tensor silently turns direct I/O off.  field case A10, A11, A14"""
    with Engine() as engine:
        file = engine.open(swap_path, offset_alignment_nbytes=4096, memory_alignment_nbytes=4096)
        engine.write(file, 0, random_bytes(1536, 512)).wait()
        stats = engine.stats()
    assert (stats.write_direct_nbytes, stats.bounced_nbytes) == (4096, 1536)
    assert stats.write_buffered_nbytes == 0


def test_writer_refused_after_a_good_open_goes_on_buffered_with_one_warning(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else an overlay that accepts the flag but not the transfer fails.  field case A11, A13"""
    source = random_bytes(TOTAL_NBYTES + 1001, 1)
    destination = torch.full_like(source, 0xAA)
    with (
        Engine(fault_script="write 1 errno 22", queue_depth=1) as engine,
        pytest.warns(BufferedFallbackWarning) as told,
    ):
        file = engine.open(swap_path)
        assert file.direct
        engine.write(file, 0, source).wait()
        engine.read(file, 0, destination).wait()
        stats = engine.stats()
        assert not file.direct
    assert torch.equal(source, destination)
    assert stats.write_direct_nbytes == 0
    # The first block had been padded for direct I/O; its padding lies under the next one.
    assert stats.write_buffered_nbytes == source.nbytes
    assert stats.read_buffered_nbytes == source.nbytes
    assert len(told) == 1
    assert str(swap_path.parent) in str(told[0].message)


def test_writers_in_flight_while_one_is_refused_all_end_right(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else the blocks that were under way when the mode changed are lost."""
    source = random_bytes(TOTAL_NBYTES, 1)
    destination = torch.full_like(source, 0xAA)
    with (
        Engine(fault_script="write 5 errno 22; write 7 errno 22", block_nbytes=8192) as engine,
        pytest.warns(BufferedFallbackWarning),
    ):
        file = engine.open(swap_path)
        engine.write(file, 0, source).wait()
        engine.read(file, 0, destination).wait()
        stats = engine.stats()
    assert torch.equal(source, destination)
    assert stats.write_direct_nbytes + stats.write_buffered_nbytes == TOTAL_NBYTES


def test_writer_that_requires_direct_gets_the_refusal_as_an_error(swap_path: Path) -> None:
    """Else a user who ruled out the page cache gets it all the same."""
    with Engine(fault_script="write 1 errno 22") as engine:
        file = engine.open(swap_path, direct=DirectMode.REQUIRE)
        with pytest.raises(SwapWriteError) as raised:
            engine.write(file, 0, torch.zeros(4096, dtype=torch.uint8)).wait()
        assert raised.value.errno == errno.EINVAL
        assert file.direct


@pytest.mark.usefixtures("refuse_direct_open")
def test_opener_where_the_flag_is_refused_goes_on_buffered_with_one_warning(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else swap on an older tmpfs can't even start.  field case A12"""
    source = random_bytes(5000)
    destination = torch.full_like(source, 0xAA)
    with Engine() as engine:
        with pytest.warns(BufferedFallbackWarning) as told:
            file = engine.open(swap_path)
            engine.open(swap_path).close()
        assert len(told) == 1
        engine.write(file, 0, source).wait()
        engine.read(file, 0, destination).wait()
        assert not file.direct
        with pytest.raises(SwapPathError) as raised:
            engine.open(swap_path, direct=DirectMode.REQUIRE)
        assert raised.value.errno == errno.EINVAL
    assert torch.equal(source, destination)
