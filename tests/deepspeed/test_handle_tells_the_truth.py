"""Where DeepSpeed's engine reports success for what did not happen, ours does it, or says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.deepspeed import aio_handle
from nvmeswap.errors import SwapPathError, SwapReadError, SwapSpaceError, SwapUsageError

MIB = 1 << 20
MakeBytes = Callable[[int], torch.Tensor]


def poisoned(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("is_async", [False, True])
def test_full_disk_is_an_error(
    small_filesystem: Path, random_bytes: MakeBytes, is_async: bool
) -> None:
    """DeepSpeed says success, and the file ends where the disk did.  field case K01"""
    handle = aio_handle()
    path = small_filesystem / "a.swp"
    with pytest.raises(SwapSpaceError) as raised:
        handle.pwrite(random_bytes(32 * MIB), path, False, is_async)
    assert raised.value.path == path
    assert raised.value.got_nbytes is not None and raised.value.got_nbytes < 32 * MIB
    assert path.stat().st_size == 0
    assert handle.wait() == 0


def test_file_that_does_not_fit_any_more_is_left_as_it_was(
    small_filesystem: Path, random_bytes: MakeBytes
) -> None:
    handle = aio_handle()
    path = small_filesystem / "a.swp"
    handle.sync_pwrite(random_bytes(MIB), path)
    with pytest.raises(SwapSpaceError):
        handle.sync_pwrite(random_bytes(32 * MIB), path)
    assert path.read_bytes() == bytes_of(random_bytes(MIB))


def test_full_disk_under_a_sparse_file_is_an_error(
    small_filesystem: Path, random_bytes: MakeBytes
) -> None:
    """DeepSpeed says success, and half of what is read back is zeros. Here `wait` says it, because
    the filesystem does not tell holes before.  field case K01"""
    handle = aio_handle()
    path = small_filesystem / "a.swp"
    path.touch()
    os.truncate(path, 32 * MIB)
    handle.async_pwrite(random_bytes(32 * MIB), path)
    with pytest.raises(SwapSpaceError) as raised:
        handle.wait()
    assert raised.value.path == path
    assert handle.wait() == 0


def test_full_disk_can_still_be_read(small_filesystem: Path, random_bytes: MakeBytes) -> None:
    path = small_filesystem / "a.swp"
    path.write_bytes(bytes_of(random_bytes(100_000)))
    with pytest.raises(OSError), (small_filesystem / "hog").open("wb", buffering=0) as hog:
        while True:
            hog.write(bytes(4096))
    back = poisoned(100_000)
    assert aio_handle().sync_pread(back, path) == 1
    assert torch.equal(back, random_bytes(100_000))


@pytest.mark.parametrize("nbytes", [1, 511, 1000, 4095, 4097, 3 * MIB + 13])
@pytest.mark.parametrize("parallelism", [1, 16])
def test_length_may_be_any(
    tmp_path: Path, random_bytes: MakeBytes, nbytes: int, parallelism: int
) -> None:
    """DeepSpeed moves nothing and says success, or -1 where it does not divide by the threads."""
    handle = aio_handle(intra_op_parallelism=parallelism)
    path = tmp_path / "a.swp"
    assert handle.sync_pwrite(random_bytes(nbytes), path) == 1
    assert path.read_bytes() == bytes_of(random_bytes(nbytes))
    back = poisoned(nbytes + 1)
    assert handle.sync_pread(back[:nbytes], path) == 1
    assert torch.equal(back[:nbytes], random_bytes(nbytes))
    assert back[nbytes] == 0xA5


def test_length_may_be_less_than_a_sector_a_thread(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """4 KiB over 16 threads: DeepSpeed leaves an empty file and says success."""
    handle = aio_handle(block_size=1024, queue_depth=2, intra_op_parallelism=16)
    assert handle.sync_pwrite(random_bytes(4096), tmp_path / "a.swp") == 1
    assert (tmp_path / "a.swp").read_bytes() == bytes_of(random_bytes(4096))


@pytest.mark.parametrize("misaligned_by", [4, 128, 512])
def test_memory_may_lie_anywhere(
    tmp_path: Path, random_bytes: MakeBytes, misaligned_by: int
) -> None:
    """DeepSpeed's own optimizer reads gradients so, and trains on the rest of the buffer."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    pinned = handle.new_cpu_locked_tensor(2 * MIB, torch.empty(0, dtype=torch.uint8))
    part = pinned[misaligned_by : misaligned_by + MIB]
    part.copy_(random_bytes(MIB))
    assert handle.sync_pwrite(part, path) == 1
    pinned.fill_(0xA5)
    assert handle.sync_pread(part, path) == 1
    assert torch.equal(part, random_bytes(MIB))
    assert (pinned[:misaligned_by] == 0xA5).all()
    assert (pinned[misaligned_by + MIB :] == 0xA5).all()
    handle.free_cpu_locked_tensor(pinned)


@pytest.mark.parametrize("is_async", [False, True])
def test_tensor_may_have_gaps(tmp_path: Path, random_bytes: MakeBytes, is_async: bool) -> None:
    """DeepSpeed fills a copy and leaves the destination as it was."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    source, destination = random_bytes(20_000), poisoned(20_000)
    handle.pwrite(source[::2], path, False, is_async)
    handle.pread(destination[::2], path, False, is_async)
    handle.wait()
    assert path.read_bytes() == bytes_of(source[::2])
    assert torch.equal(destination[::2], source[::2])
    assert (destination[1::2] == 0xA5).all()


def test_transposed_and_conjugated_tensors_come_back(tmp_path: Path) -> None:
    handle = aio_handle()
    data = torch.randn(50, 70, dtype=torch.complex64)
    back = torch.zeros(50, 70, dtype=torch.complex64)
    handle.sync_pwrite(data.t().conj(), tmp_path / "a.swp")
    handle.sync_pread(back.t(), tmp_path / "a.swp")
    assert torch.equal(back, data.conj())


def test_write_without_offset_is_the_whole_file(tmp_path: Path, random_bytes: MakeBytes) -> None:
    """In DeepSpeed the end of the longer file before stays."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    handle.async_pwrite(random_bytes(8192), path)
    handle.async_pwrite(random_bytes(4096), path)
    assert handle.wait() == 2
    assert path.read_bytes() == bytes_of(random_bytes(4096))


def test_write_at_an_offset_changes_those_bytes_alone(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """Parts of one file may come in any order, the first one last."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    data = random_bytes(3000)
    for begin in (2000, 1000, 0):
        handle.async_pwrite(data[begin : begin + 1000], path, begin)
    assert handle.wait() == 3
    assert path.read_bytes() == bytes_of(data)


@pytest.mark.parametrize("offset", [1, 100, 512, 1024, 4095, 4096, 10_001])
def test_offset_may_be_any(tmp_path: Path, random_bytes: MakeBytes, offset: int) -> None:
    """DeepSpeed moves nothing and says success."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    before = bytearray(bytes_of(random_bytes(50_000)))
    path.write_bytes(before)
    handle.sync_pwrite(random_bytes(9_999), path, offset)
    before[offset : offset + 9_999] = bytes_of(random_bytes(9_999))
    assert path.read_bytes() == before
    back = poisoned(9_999)
    handle.sync_pread(back, path, file_offset=offset)
    assert torch.equal(back, random_bytes(9_999))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4096, 1 << 40])
def test_end_of_file_is_an_error(
    tmp_path: Path, random_bytes: MakeBytes, is_async: bool, offset: int
) -> None:
    """DeepSpeed aborts the process."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    path.write_bytes(bytes_of(random_bytes(4096)))
    back = poisoned(4097)
    with pytest.raises(SwapReadError) as raised:
        handle.pread(back, path, False, is_async, offset)
    assert raised.value.path == path and raised.value.offset_bytes == offset
    assert (back == 0xA5).all()
    assert handle.wait() == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_missing_file_is_an_error(tmp_path: Path, is_async: bool) -> None:
    """DeepSpeed returns -1, which its swapper turns into an assert without a word."""
    handle = aio_handle()
    with pytest.raises(SwapPathError) as raised:
        handle.pread(poisoned(8), tmp_path / "none.swp", False, is_async)
    assert raised.value.path == tmp_path / "none.swp"
    with pytest.raises(SwapPathError):
        handle.pwrite(poisoned(8), tmp_path / "no folder" / "a.swp", False, is_async)
    assert handle.wait() == 0


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    handle = aio_handle()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SwapPathError):
            handle.sync_pwrite(poisoned(8), path)
        with pytest.raises(SwapPathError):
            handle.sync_pread(poisoned(8), path)
    with pytest.raises(SwapPathError):
        handle.async_pwrite(poisoned(8), fd=1000)


def test_what_is_no_tensor_or_offset_is_an_error(tmp_path: Path) -> None:
    handle = aio_handle()
    with pytest.raises(SwapUsageError):
        handle.sync_pwrite(b"bytes", tmp_path / "a.swp")  # type: ignore[arg-type]
    with pytest.raises(SwapUsageError):
        handle.sync_pwrite(torch.eye(3).to_sparse(), tmp_path / "a.swp")
    with pytest.raises(SwapUsageError):
        handle.sync_pwrite(poisoned(8), tmp_path / "a.swp", -1)
    assert not (tmp_path / "a.swp").exists()


def test_empty_tensor_is_an_empty_file(tmp_path: Path) -> None:
    handle = aio_handle()
    handle.async_pwrite(torch.empty(0), tmp_path / "a.swp")
    handle.async_pread(torch.empty(0), tmp_path / "a.swp")
    assert handle.wait() == 2
    assert (tmp_path / "a.swp").stat().st_size == 0


def test_replaced_file_is_not_served_from_the_old_one(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    handle = aio_handle()
    path, back = tmp_path / "a.swp", poisoned(4096)
    handle.sync_pwrite(random_bytes(8192), path)
    handle.sync_pread(back, path)
    (tmp_path / "new").write_bytes(bytes_of(random_bytes(4096)))
    os.replace(tmp_path / "new", path)
    handle.sync_pread(back, path)
    assert torch.equal(back, random_bytes(4096))
    path.unlink()
    with pytest.raises(SwapPathError):
        handle.sync_pread(back, path)
