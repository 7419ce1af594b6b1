"""What the other tests build on: a script does what it says, and the same for the same seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapConfigError, SwapError, SwapReadError, SwapTimeoutError
from nvmeswap.io import DirectMode, Engine

BACKENDS = ("uring", "aio", "posix", "skeleton")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "params.swp"
    path.touch()
    os.truncate(path, 1 << 20)
    return path


def outcomes(path: Path, script: str, backend: str) -> list[object]:
    """How each of some reads and writes ends, one after the other, and how often it was tried."""
    found: list[object] = []
    with Engine(backend=backend, fault_script=script, queue_depth=1) as engine:
        file = engine.open(path, direct=DirectMode.REQUIRE)
        for number in range(60):
            buffer = torch.zeros(20_000, dtype=torch.uint8)
            move = engine.write if number % 2 else engine.read
            try:
                move(file, number << 12, buffer).wait()
                found.append(engine.stats().retry_count)
            except SwapError as error:
                found.append((type(error), error.errno, error.got_nbytes))
        file.close()
    return found


def test_seed_decides_alone_what_fails(path: Path) -> None:
    """Else a schedule that failed in the night can't be run again."""
    script = "seed {} rate 30 short,errno,refuse,busy,delay,late"
    first = outcomes(path, script.format(7), "aio")
    assert all(outcomes(path, script.format(7), backend) == first for backend in BACKENDS)
    assert outcomes(path, script.format(8), "aio") != first
    assert outcomes(path, "seed 7 rate 0", "aio") == [0] * 60


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_that_is_late_comes_after_others(path: Path, backend: str) -> None:
    """Else an engine that takes the order of completion for that of submission passes."""
    with Engine(backend=backend, fault_script="read 1 delay 100; read 2 late 1") as engine:
        file = engine.open(path)
        buffers = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
        slow, late = (engine.read(file, at << 12, buffer) for at, buffer in enumerate(buffers))
        late.wait()
        assert slow.done()
        file.close()


def test_block_that_is_late_comes_when_no_other_is_under_way(path: Path) -> None:
    """Else the script itself makes the engine hang."""
    with Engine(fault_script="read 1 never; read 2 late 5") as engine:
        file = engine.open(path)
        lost = engine.read(file, 0, torch.empty(4096, dtype=torch.uint8))
        late = engine.read(file, 4096, torch.empty(4096, dtype=torch.uint8))
        late.wait()
        assert not lost.done()
        engine.inject("")
        lost.wait()
        file.close()


def test_seed_that_draws_never_is_lifted_by_another_script(path: Path) -> None:
    """Else no schedule with a lost block could be brought to its end."""
    with Engine(fault_script="seed 1 rate 100 never") as engine:
        file = engine.open(path)
        lost = engine.read(file, 0, torch.empty(4096, dtype=torch.uint8))
        with pytest.raises(SwapTimeoutError):
            lost.wait(0.05)
        engine.inject("seed 1 rate 0 never")
        lost.wait()
        file.close()


def test_read_that_makes_no_progress_in_the_padding_is_not_the_end_of_the_file(
    path: Path,
) -> None:
    """Else the message sends its reader after a file that was cut short."""
    os.truncate(path, 1000)
    with Engine(fault_script="read 1 short 0") as engine:
        file = engine.open(path)
        with pytest.raises(SwapReadError) as raised:
            engine.read(file, 0, torch.empty(1000, dtype=torch.uint8)).wait()
        assert "ends" not in (raised.value.cause or "")
        with pytest.raises(SwapReadError, match="ends within"):
            engine.read(file, 0, torch.empty(1001, dtype=torch.uint8)).wait()
        file.close()


@pytest.mark.parametrize("script", (
    "seed", "seed x", "seed 1 rate", "seed 1 rate 101", "seed 1 rate 5 short more",
    "seed 1 sometimes", "any 1 refuse 0", "any 1 errno five", "any 0 busy", "any 1 busy 2",
    "any 1 late",
))
def test_script_that_is_not_understood_is_refused(script: str) -> None:
    """Else a misspelt test injects nothing, and passes."""
    with pytest.raises(SwapConfigError, match="not understood"):
        Engine(fault_script=script)
