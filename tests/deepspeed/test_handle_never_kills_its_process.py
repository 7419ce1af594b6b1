"""Where DeepSpeed's engine aborts the process or stands still, ours goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.deepspeed import aio_handle
from nvmeswap.errors import SwapSpaceError

MIB = 1 << 20
MakeBytes = Callable[[int], torch.Tensor]

SCRIPT_START = """
import sys, torch
from nvmeswap.deepspeed import aio_handle
handle = aio_handle(block_size=4096)
data = torch.full((16 << 20,), 7, dtype=torch.uint8)
back = torch.empty_like(data)
handle.sync_pwrite(data, sys.argv[1])
handle.async_pread(back, sys.argv[1])
handle.async_pwrite(data, sys.argv[1] + ".2")
"""


def run_script(end: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT_START + end, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_wait_with_nothing_pending_is_zero() -> None:
    assert aio_handle().wait() == 0


def test_queue_may_be_deeper_than_the_system_allows(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """fs.aio-max-nr is for the whole machine."""
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    handle = aio_handle(block_size=4096, queue_depth=most + 1, intra_op_parallelism=16)
    assert handle.get_queue_depth() == most + 1
    back = torch.zeros(MIB, dtype=torch.uint8)
    handle.sync_pwrite(random_bytes(MIB), tmp_path / "a.swp")
    handle.sync_pread(back, tmp_path / "a.swp")
    assert torch.equal(back, random_bytes(MIB))


@pytest.mark.parametrize("block_size", [1, 1000, 1 << 33])
def test_block_may_have_any_size(
    tmp_path: Path, random_bytes: MakeBytes, block_size: int
) -> None:
    handle = aio_handle(block_size=block_size)
    back = torch.zeros(MIB, dtype=torch.uint8)
    handle.sync_pwrite(random_bytes(MIB), tmp_path / "a.swp")
    handle.sync_pread(back, tmp_path / "a.swp")
    assert torch.equal(back, random_bytes(MIB))


def test_dropped_handle_finishes_what_it_began(tmp_path: Path, random_bytes: MakeBytes) -> None:
    handle = aio_handle(block_size=4096)
    back = torch.zeros(16 * MIB, dtype=torch.uint8)
    handle.async_pwrite(random_bytes(8 * MIB), tmp_path / "a.swp")
    handle.async_pread(back[::2], tmp_path / "a.swp")
    del handle
    assert torch.equal(back[::2], random_bytes(8 * MIB))
    assert (tmp_path / "a.swp").read_bytes() == random_bytes(8 * MIB).numpy().tobytes()


def test_dropped_handle_warns_of_what_failed(
    small_filesystem: Path, random_bytes: MakeBytes
) -> None:
    path = small_filesystem / "a.swp"
    path.touch()
    os.truncate(path, 32 * MIB)
    handle = aio_handle()
    handle.async_pwrite(random_bytes(32 * MIB), path)
    with pytest.warns(RuntimeWarning, match="nobody waited") as warned:
        del handle
    assert any(str(path) in str(warning.message) for warning in warned)


def test_exception_in_the_middle_stays_visible(tmp_path: Path) -> None:
    """DeepSpeed ends such a process with SIGABRT, and the exception is never seen."""
    done = run_script("raise KeyError('the real cause')", tmp_path / "a.swp")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'the real cause'")
    assert (tmp_path / "a.swp.2").read_bytes() == bytes([7]) * (16 << 20)


def test_process_may_end_with_transfers_under_way(tmp_path: Path) -> None:
    done = run_script("", tmp_path / "a.swp")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.swp.2").read_bytes() == bytes([7]) * (16 << 20)


def test_forked_child_is_told_and_can_make_its_own(tmp_path: Path) -> None:
    end = """
import os, warnings
from nvmeswap.errors import SwapForkError
warnings.simplefilter("ignore")
pinned = handle.new_cpu_locked_tensor(4096, data)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as DataLoader's workers do: torch's threads don't survive a fork
    try:
        handle.wait()
    except SwapForkError:
        own = aio_handle()
        assert not own.is_pinned(pinned)
        own.sync_pwrite(data[:1000], sys.argv[1] + ".3")
        os._exit(42)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert handle.wait() == 2 and bool((back == 7).all())
"""
    done = run_script(end, tmp_path / "a.swp")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.swp.3").stat().st_size == 1000


def test_failed_transfer_is_told_once_and_the_rest_is_over(
    small_filesystem: Path, random_bytes: MakeBytes
) -> None:
    handle = aio_handle()
    sparse, small = small_filesystem / "sparse.swp", small_filesystem / "small.swp"
    handle.sync_pwrite(random_bytes(MIB), small)
    sparse.touch()
    os.truncate(sparse, 32 * MIB)
    back = torch.zeros(MIB, dtype=torch.uint8)
    handle.async_pwrite(random_bytes(32 * MIB), sparse)
    handle.async_pread(back, small)
    with pytest.raises(SwapSpaceError):
        handle.wait()
    assert torch.equal(back, random_bytes(MIB))
    assert handle.wait() == 0
    os.truncate(sparse, 0)
    assert handle.sync_pwrite(random_bytes(MIB), sparse) == 1


def test_synchronous_call_leaves_the_pending_ones_to_wait(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """In DeepSpeed it waits for all, and the `wait` that follows aborts."""
    handle = aio_handle()
    handle.async_pwrite(random_bytes(MIB), tmp_path / "a.swp")
    assert handle.sync_pwrite(random_bytes(MIB), tmp_path / "b.swp") == 1
    assert handle.wait() == 1


def test_many_threads_share_a_handle(tmp_path: Path, random_bytes: MakeBytes) -> None:
    handle = aio_handle(block_size=4096)
    counts: list[int] = []
    wrong: list[int] = []

    def work(number: int) -> None:
        data, back = random_bytes(10_000 + number), torch.zeros(10_000 + number, dtype=torch.uint8)
        for _ in range(20):
            path = tmp_path / f"{number}.swp"
            handle.async_pwrite(data, path)
            if handle.sync_pread(back.fill_(0), path) != 1 or not torch.equal(back, data):
                wrong.append(number)
            counts.append(handle.wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(counts) == 8 * 20
