"""Whatever comes between, a submission is held by somebody or was never made."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapReadError, SwapUsageError
from nvmeswap.io import native
from nvmeswap.io.engine import DirectMode, Engine, Member
from nvmeswap.io.file import Stripes


def sized(path: Path, nbytes: int) -> Path:
    path.touch()
    os.truncate(path, nbytes)
    return path


def test_buffers_of_a_submission_that_ctrl_c_cut_short_stay_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the transfer, which is under way, lands in memory that is somebody else's by then."""
    path = sized(tmp_path / "a", 4096)

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with Engine(backend="posix", fault_script="read 1 delay 1500") as engine:
        file = engine.open(path, direct=DirectMode.OFF)
        buffer = torch.zeros(4096, dtype=torch.uint8)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(native, "_check", interrupt)
            engine.read(file, 0, buffer)
        holders = [each for each in gc.get_referrers(buffer) if isinstance(each, (list, tuple))]
        assert engine.stats().in_flight_count == 1
        assert holders


def test_threads_that_submit_at_once_all_get_their_request(tmp_path: Path) -> None:
    """Else one of them has an error of ours for a transfer that went well."""
    path = sized(tmp_path / "a", 4096)
    errors: list[BaseException] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Engine(backend="posix") as engine:
            file = engine.open(path, direct=DirectMode.OFF)
            end_s = time.monotonic() + 2

            def read() -> None:
                buffer = torch.zeros(4096, dtype=torch.uint8)
                try:
                    while time.monotonic() < end_s and not errors:
                        engine.read(file, 0, buffer).wait()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=read) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


def test_handle_that_the_collector_drops_amid_a_submission_does_not_hang_it(tmp_path: Path) -> None:
    """Else a training loop stands still, for ever, at a moment that nobody chose."""
    script = textwrap.dedent("""
        import gc, sys, torch
        import nvmeswap.io.engine as engine
        from nvmeswap.deepspeed import aio_handle
        kept, dropped = aio_handle(), aio_handle()  # of one size: they share an engine
        memory = dropped.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8))
        dropped.async_pwrite(memory, sys.argv[1] + "/x")
        dropped.free_cpu_locked_tensor(memory)
        dropped.itself = dropped
        gc.disable()
        del dropped
        made = engine.Request
        def collect_and_make(*arguments):
            gc.collect()
            return made(*arguments)
        engine.Request = collect_and_make
        kept.sync_pwrite(torch.zeros(4096, dtype=torch.uint8), sys.argv[1] + "/y")
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


def test_drive_that_makes_no_progress_is_not_told_as_the_end_of_its_file(tmp_path: Path) -> None:
    """Else the user looks for a file that was cut, where a drive stands still."""
    members = [Member(sized(tmp_path / name, 8 << 20), direct=DirectMode.OFF) for name in "ab"]
    with Engine(backend="posix", fault_script="read 1 short 0") as engine:
        file = engine.open_striped(members)
        with pytest.raises(SwapReadError, match="without moving anything"):
            engine.read(file, 9 << 20, torch.zeros(1 << 20, dtype=torch.uint8)).wait()


@pytest.mark.parametrize("weights, nbytes", (((100,), 1 << 20), ((32, 32), 1 << 58)))
def test_layout_that_the_engine_cannot_count_is_refused(
    weights: tuple[int, ...], nbytes: int
) -> None:
    """Else an assert, or a division by zero, ends the process."""
    with pytest.raises(SwapUsageError):
        Stripes(weights, nbytes)
