"""Drives with sectors of 4096 bytes, and layers that promise direct I/O and refuse it."""

from __future__ import annotations

import errno
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.config import SwapBlock
from nvmeswap.io import BufferedFallbackWarning, DirectMode, Engine
from nvmeswap.io.probe import probe_folder
from tests.faults.kernel import build_preload, run_program

MiB = 1 << 20
SIZES = (1, 511, 512, 1536, 4095, 4096, 4097, MiB + 513)


@pytest.fixture
def large_sectors(tmp_path: Path) -> Iterator[Path]:
    """ext4 on a loop device that refuses anything but multiples of 4096 bytes."""
    image, folder = tmp_path / "image", tmp_path / "drive"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MiB)
    undo: list[list[str]] = []

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no loop device: {done.stderr.strip()}")
        return done.stdout.strip()

    try:
        device = run("losetup", "--sector-size", "4096", "--find", "--show", str(image))
        undo.append(["losetup", "--detach", device])
        run("mkfs.ext4", "-q", device)
        run("mount", device, str(folder))
        undo.append(["umount", str(folder)])
        yield folder
    finally:
        for command in reversed(undo):
            subprocess.run(command, check=True)


@pytest.mark.parametrize("backend", ("uring", "aio", "posix"))
def test_tensor_of_any_size_goes_directly_to_a_drive_with_large_sectors(
    large_sectors: Path, random_bytes: Callable[..., torch.Tensor], backend: str
) -> None:
    """Requests cut to 512 bytes, or a memory of 512, are refused there.  field cases A10, A14"""
    found = probe_folder(large_sectors, backend=backend, direct=DirectMode.REQUIRE)
    assert found.direct
    path = large_sectors / "a.swp"
    path.write_bytes(bytes(2 * MiB))
    with Engine(backend=backend, block_nbytes=65_536) as engine:
        file = engine.open(path, direct=DirectMode.REQUIRE,
                           offset_alignment_nbytes=found.offset_alignment_nbytes,
                           memory_alignment_nbytes=found.memory_alignment_nbytes)
        for nbytes in SIZES:
            for misaligned_by in (0, 3, 64, 512):
                source = random_bytes(nbytes, misaligned_by)
                engine.write(file, 4096, source).wait()
                destination = torch.full_like(source, 0xAA)
                engine.read(file, 4096, destination).wait()
                assert torch.equal(destination, source), (nbytes, misaligned_by)
        stats = engine.stats()
        file.close()
    assert stats.write_buffered_nbytes == stats.read_buffered_nbytes == 0
    assert stats.write_direct_nbytes % 4096 == 0


def test_swapper_on_a_drive_with_large_sectors_stays_direct(large_sectors: Path) -> None:
    """The same through the front door; every fallback would be a warning.  field case A14"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with TensorSwapper(large_sectors, swap=SwapBlock(direct="require")) as swapper:
            for nbytes in SIZES:
                tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
                swapper.swap_out("t", tensor)
                assert torch.equal(swapper.swap_in("t"), tensor), nbytes


# Notes of all transfers on direct descriptors how many were not aligned.
RECORDER = """
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/uio.h>
static long seen, misaligned;
static ssize_t note(long call, int fd, const struct iovec *vectors, int count, off_t offset)
{
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        uintptr_t all = (uintptr_t)offset;
        for (int i = 0; i < count; i++)
            all |= (uintptr_t)vectors[i].iov_base | vectors[i].iov_len;
        __atomic_add_fetch(&seen, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&misaligned, all % 4096 != 0, __ATOMIC_RELAXED);
    }
    return syscall(call, fd, vectors, count, offset, 0L);
}
ssize_t preadv(int fd, const struct iovec *vectors, int count, off_t offset)
{
    return note(SYS_preadv, fd, vectors, count, offset);
}
ssize_t pwritev(int fd, const struct iovec *vectors, int count, off_t offset)
{
    return note(SYS_pwritev, fd, vectors, count, offset);
}
__attribute__((destructor)) static void tell(void)
{
    printf("%d %ld\\n", seen > 0, misaligned);
}
"""


def test_every_transfer_handed_to_the_kernel_is_aligned_in_address_length_and_offset(
    tmp_path: Path,
) -> None:
    """What one drive lets pass another refuses.  field cases A10, A14"""
    told = run_program(
        "path = folder / 'a.swp'\n"
        "path.write_bytes(bytes(4 << 20))\n"
        "script = 'any 9 short 5000'\n"
        "with Engine(backend='posix', block_nbytes=65536, fault_script=script) as engine:\n"
        "    file = engine.open(path, offset_alignment_nbytes=4096, memory_alignment_nbytes=4096)\n"
        "    whole = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)\n"
        "    for first in (0, 3, 64, 1000):\n"
        "        for nbytes in (1, 1536, 4096, 70_000, (1 << 20) + 513):\n"
        "            source = whole[first : first + nbytes]\n"
        "            engine.write(file, 8192, source).wait()\n"
        "            copy = torch.full((nbytes + 7,), 7, dtype=torch.uint8)[7:]\n"
        "            engine.read(file, 8192, copy).wait()\n"
        "            assert torch.equal(copy, source)\n",
        tmp_path, environment={"LD_PRELOAD": str(build_preload(tmp_path, RECORDER))},
    )
    assert told.splitlines()[-1] == "1 0"


@pytest.mark.parametrize("backend", ("uring", "aio", "posix"))
def test_reader_refused_first_at_a_read_goes_on_buffered(
    swap_path: Path, random_bytes: Callable[..., torch.Tensor], backend: str
) -> None:
    """Overlays that took the flag, and writes, refuse at the first read.  field case A13"""
    source = random_bytes(MiB + 100)
    destination = torch.full_like(source, 0xAA)
    with (
        Engine(backend=backend, fault_script=f"read 1 errno {errno.EINVAL}") as engine,
        pytest.warns(BufferedFallbackWarning) as told,
    ):
        file = engine.open(swap_path)
        engine.write(file, 0, source).wait()
        assert file.direct
        engine.read(file, 0, destination).wait()
        assert not file.direct
        again = torch.full_like(source, 0xAA)
        engine.write(file, 0, destination).wait()
        engine.read(file, 0, again).wait()
    assert torch.equal(source, destination) and torch.equal(source, again)
    assert len(told) == 1
