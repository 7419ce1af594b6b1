"""Requests behind one that the backend refuses for good are served, or refused, too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapReadError
from nvmeswap.io import Engine


@pytest.mark.parametrize("queue_depth", (1, 8))
def test_all_waiters_on_a_kernel_that_stays_busy_are_told(tmp_path: Path, queue_depth: int) -> None:
    """Else the first one gets an error, and those behind it hang for ever."""
    path = tmp_path / "params.swp"
    path.touch()
    os.truncate(path, 1 << 20)
    with Engine(fault_script="read * busy", queue_depth=queue_depth) as engine:
        file = engine.open(path)
        reads = [engine.read(file, at << 12, torch.empty(4096, dtype=torch.uint8)) for at in (0, 8)]
        for read in reads:
            with pytest.raises(SwapReadError) as raised:
                read.wait(20.0)
            assert raised.value.errno == errno.EAGAIN
        file.close()
