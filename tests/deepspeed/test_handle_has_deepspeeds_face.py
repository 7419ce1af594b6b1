"""What DeepSpeed's engine API promises and keeps, ours keeps too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nvmeswap.deepspeed.inject
from nvmeswap.deepspeed import aio_handle, pin_handle
from nvmeswap.errors import SwapChecksumError, SwapUsageError

MakeBytes = Callable[[int], torch.Tensor]


def test_handle_keeps_what_it_was_given() -> None:
    handle = aio_handle(1024, 2, True, True, 3)
    assert handle.get_block_size() == 1024
    assert handle.get_queue_depth() == 2
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 3
    assert handle.get_alignment() == 3 * 512


def test_handle_has_deepspeeds_defaults() -> None:
    handle = aio_handle()
    assert handle.get_block_size() == 1 << 20
    assert handle.get_queue_depth() == 128
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is False
    assert handle.get_intra_op_parallelism() == 1


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"queue_depth": -1}, {"overlap_events": "true"}]
)
def test_wrong_option_is_refused(wrong: dict[str, object]) -> None:
    """DeepSpeed's own tuner prints booleans as strings."""
    with pytest.raises(SwapUsageError):
        aio_handle(**wrong)  # type: ignore[arg-type]


def test_all_calls_return_what_deepspeeds_do(tmp_path: Path, random_bytes: MakeBytes) -> None:
    handle = aio_handle()
    path = str(tmp_path / "a.swp")
    data, back = random_bytes(1 << 16), torch.empty(1 << 16, dtype=torch.uint8)

    assert handle.write(data, path, False) == 0
    assert handle.read(back, path, True) == 0
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pread(back, path, False, False, 0) == 1
    assert handle.pwrite(buffer=data, filename=path, validate=False, **{"async": True}) == 0
    assert handle.pread(back, path, validate=True, **{"async": True}) == 0
    assert handle.wait() == 2
    assert handle.sync_pwrite(buffer=data, filename=path, file_offset=0) == 1
    assert handle.sync_pread(buffer=back, filename=path, file_offset=0) == 1
    assert handle.async_pwrite(data, path) == 0
    assert handle.async_pwrite(buffer=data, filename=path, file_offset=1 << 16) == 0
    assert handle.async_pread(back, path) == 0
    assert handle.wait() == 3
    assert torch.equal(back, data)
    assert os.path.getsize(path) == 2 << 16


def test_pwrite_without_async_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        aio_handle().pwrite(torch.zeros(8), tmp_path / "a.swp", False)


def test_write_by_descriptor_outlives_it(tmp_path: Path, random_bytes: MakeBytes) -> None:
    """FastPersist writes through a descriptor, opened as only DeepSpeed opens it."""
    handle = aio_handle()
    path = tmp_path / "a.swp"
    data = random_bytes(3 << 16)
    for begin in (0, 1 << 16, 1 << 17):
        fd = os.open(path, os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
        part = data[begin : begin + (1 << 16)]
        assert handle.async_pwrite(buffer=part, fd=fd, file_offset=begin) == 0
        os.close(fd)
    assert handle.wait() == 3
    assert path.read_bytes() == data.numpy().tobytes()


def test_write_by_descriptor_reaches_a_file_without_a_name(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    path = tmp_path / "a.swp"
    with path.open("w+b") as file:
        path.unlink()
        handle = aio_handle()
        assert handle.async_pwrite(random_bytes(5000), file.fileno()) == 0
        assert handle.wait() == 1
        assert file.read() == random_bytes(5000).numpy().tobytes()
    assert not path.exists()


def test_validation_finds_another_writer(tmp_path: Path, random_bytes: MakeBytes) -> None:
    path = tmp_path / "a.swp"
    handle = aio_handle()
    assert handle.pwrite(random_bytes(8192), path, True, True) == 0
    with path.open("r+b") as file:  # after ours has landed, before anybody waits for it
        while file.read() != random_bytes(8192).numpy().tobytes():
            file.seek(0)
        file.seek(100)
        file.write(b"not ours")
    with pytest.raises(SwapChecksumError) as raised:
        handle.wait()
    assert raised.value.path == path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_any_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    handle = aio_handle()
    data = torch.randn(3, 1000).to(dtype).requires_grad_(dtype.is_floating_point)
    back = torch.ones(3, 1000).to(dtype)
    handle.sync_pwrite(data, tmp_path / "a.swp")
    handle.sync_pread(back, tmp_path / "a.swp")
    assert torch.equal(back, data.detach())


def test_locked_tensor_is_exactly_as_large_as_asked_for() -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(num_elem=1025, example_tenosr=torch.empty(0))
    assert tensor.dtype is torch.float32 and tensor.shape == (1025,)
    assert tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    assert not handle.is_pinned(tensor)


def test_foreign_tensor_is_neither_pinned_nor_freed() -> None:
    handle = aio_handle()
    foreign = torch.zeros(1 << 20)
    assert not handle.is_pinned(foreign)
    assert handle.free_cpu_locked_tensor(foreign) is False


def test_all_handles_know_all_locked_tensors() -> None:
    pins, one, other = pin_handle(), aio_handle(), aio_handle(4096, 8)
    of_one = one.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    of_pins = pins.new_cpu_locked_tensor(num_elem=99, example_tensor=torch.empty(0))
    for handle in (pins, one, other):
        assert handle.is_pinned(of_one[17:]) and handle.is_pinned(of_one[::3])
        assert handle.is_pinned(of_pins.view(9, 11).t())
    assert other.free_cpu_locked_tensor(of_pins)
    assert pins.free_cpu_locked_tensor_by_ptr(of_one.data_ptr())
    assert not pins.free_cpu_locked_tensor_by_ptr(of_one.data_ptr())


def test_tensor_freed_under_way_still_arrives(tmp_path: Path, random_bytes: MakeBytes) -> None:
    """In DeepSpeed the transfer would land in memory that belongs to somebody else."""
    nbytes = 8 << 20
    handle = aio_handle()
    handle.sync_pwrite(random_bytes(nbytes), tmp_path / "a.swp")
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).fill_(0)
    handle.async_pread(buffer, tmp_path / "a.swp")
    assert handle.free_cpu_locked_tensor(buffer)
    assert handle.wait() == 1
    assert torch.equal(buffer, random_bytes(nbytes))


def test_module_functions_move_whole_files(tmp_path: Path, random_bytes: MakeBytes) -> None:
    data, back = random_bytes(1 << 16), torch.zeros(1 << 16, dtype=torch.uint8)
    arguments = (str(tmp_path / "a.swp"), 1 << 20, 8, False, True, True)
    assert nvmeswap.deepspeed.inject.aio_write(data, *arguments) == 0
    assert nvmeswap.deepspeed.inject.aio_read(back, *arguments) == 0
    assert torch.equal(back, data)
    assert nvmeswap.deepspeed.inject.deepspeed_memcpy(back, torch.zeros_like(back)) == 0
    assert not back.any()
