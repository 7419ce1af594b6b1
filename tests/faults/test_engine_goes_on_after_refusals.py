"""Requests behind one that the backend refuses for good are served, or refused, too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapReadError
from nvmeswap.io import Engine, Request


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "params.swp"
    path.touch()
    os.truncate(path, 1 << 20)
    return path


def start_reads(engine: Engine, path: Path, count: int) -> list[Request]:
    file = engine.open(path)
    return [
        engine.read(file, at << 12, torch.empty(4096, dtype=torch.uint8)) for at in range(count)
    ]


def assert_refused(read: Request, number: int) -> None:
    with pytest.raises(SwapReadError) as raised:
        read.wait(20.0)
    assert raised.value.errno == number


@pytest.mark.parametrize("queue_depth", (1, 8))
def test_all_waiters_on_a_kernel_that_stays_busy_are_told(path: Path, queue_depth: int) -> None:
    """Else the first one gets an error, and those behind it hang for ever."""
    with Engine(fault_script="read * busy", queue_depth=queue_depth) as engine:
        for read in start_reads(engine, path, 2):
            assert_refused(read, errno.EAGAIN)


def test_waiters_behind_a_block_that_is_refused_on_its_second_try_are_told(path: Path) -> None:
    """Else the thread sleeps with an empty drive and a full queue."""
    script = "read 1 errno 4; read * refuse 5"
    with Engine(fault_script=script, queue_depth=1) as engine:
        for read in start_reads(engine, path, 3):
            assert_refused(read, errno.EIO)


def test_requests_at_close_on_a_kernel_that_stays_busy_are_told(path: Path) -> None:
    """Else close drops them, and whoever waits for them waits for ever."""
    engine = Engine(fault_script="read * busy", queue_depth=1)
    reads = start_reads(engine, path, 2)
    engine.close()
    assert [read.done() for read in reads] == [True, True]
    for read in reads:
        assert_refused(read, errno.EAGAIN)
