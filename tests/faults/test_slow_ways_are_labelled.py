"""Where the drive is not used as hoped, swapping works, and what it measures does not pretend."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import mmap
import os
import warnings
from pathlib import Path

import pytest
import torch

from nvmeswap.config import Config
from nvmeswap.io import BufferedFallbackWarning, DirectMode, Engine
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.stats import EngineStats
from tests.faults.kernel import FALLOCATE, needs_x86_64, run_program

MiB = 1 << 20


@pytest.fixture
def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """open() as on a filesystem without O_DIRECT."""
    real_open = os.open

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def move(folder: Path, found: FolderProbe, **options: int) -> EngineStats:
    """Writes and reads 4 MiB as found, compares, and returns what was counted."""
    path = folder / "a.swp"
    path.write_bytes(bytes(4 * MiB))
    source = torch.arange(MiB, dtype=torch.int32)
    destination = torch.full_like(source, -7)
    with Engine(backend=found.backend, **options) as engine:
        file = engine.open(path, direct=DirectMode.PREFER if found.direct else DirectMode.OFF)
        engine.write(file, 0, source).wait()
        engine.read(file, 0, destination).wait()
        assert torch.equal(source, destination)
        return engine.stats()


@pytest.mark.usefixtures("no_direct_io")
def test_user_whose_figures_come_from_the_page_cache_is_told(tmp_path: Path) -> None:
    """Nobody can tell a good drive from a lot of memory.  field case L03

    Whatever measures takes its label from here: the probe's `direct`, the engine's byte counters.
    """
    with pytest.warns(BufferedFallbackWarning, match="page cache"):
        found = probe_folder(tmp_path)
    assert found.direct is False
    stats = move(tmp_path, found)
    assert stats.read_direct_nbytes == stats.write_direct_nbytes == 0
    assert stats.read_buffered_nbytes == stats.write_buffered_nbytes == 4 * MiB


def test_user_who_turns_direct_io_off_gets_figures_that_say_so(tmp_path: Path) -> None:
    """Off on purpose is no reason for a warning, but for a label.  field case L03"""
    with warnings.catch_warnings():
        warnings.simplefilter("error", BufferedFallbackWarning)
        found = probe_folder(tmp_path, direct=DirectMode.OFF)
        assert found.direct is False
        assert move(tmp_path, found).write_direct_nbytes == 0


def cached_nbytes(path: Path) -> int:
    """How much of a file the page cache holds, asked of the kernel."""
    nbytes = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as file:
        address = libc.mmap(None, ctypes.c_size_t(nbytes), mmap.PROT_READ, mmap.MAP_SHARED,
                            file.fileno(), ctypes.c_int64(0))
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_bytes_counted_as_direct_are_not_in_the_page_cache(tmp_path: Path) -> None:
    """A claim in a counter while the cache grows all the same.  field case A11"""
    found = probe_folder(tmp_path)
    if not found.direct or found.filesystem not in ("ext4", "xfs"):
        pytest.skip(f"{found.filesystem} may use the page cache")
    path = tmp_path / "a.swp"
    for mode, cached in ((DirectMode.OFF, True), (DirectMode.REQUIRE, False)):
        path.unlink(missing_ok=True)
        path.touch()
        os.truncate(path, 8 * MiB)
        source = torch.arange(2 * MiB, dtype=torch.int32)
        with Engine(backend=found.backend) as engine:
            file = engine.open(path, direct=mode)
            engine.write(file, 0, source).wait()
            engine.read(file, 0, torch.empty_like(source)).wait()
            stats = engine.stats()
            file.close()
        assert stats.write_direct_nbytes == (0 if cached else 8 * MiB)
        assert cached_nbytes(path) == (8 * MiB if cached else 0)


@pytest.mark.parametrize(
    ("block_size", "queue_depth"), tuple(itertools.product((1 << 16, 1 << 20), (4, 32)))
)
def test_settings_that_a_sweep_tries_are_settings_that_a_file_can_hold(
    tmp_path: Path, block_size: int, queue_depth: int
) -> None:
    """A fast setting that can't be written down helps nobody.  field case L04

    There is no sweep in the package itself; what one would end with loads, and moves exact data.
    """
    snippet = {"aio": {"block_size": block_size, "queue_depth": queue_depth}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}} | snippet))
    aio = Config.load(path).aio
    assert (aio.block_size, aio.queue_depth) == (block_size, queue_depth)
    stats = move(tmp_path, probe_folder(tmp_path), block_nbytes=aio.block_size,
                 queue_depth=aio.queue_depth)
    assert stats.block_count == 2 * 4 * MiB // block_size


@needs_x86_64
@pytest.mark.parametrize("code", (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL))
def test_swap_where_space_can_not_be_taken_in_advance_works(tmp_path: Path, code: int) -> None:
    """A filesystem, or a sandbox, without fallocate is slower, not unusable.  field case K10"""
    told = run_program(
        f"forbid({code}, {FALLOCATE})\n"
        "with TensorSwapper(folder) as swapper:\n"
        "    for numel in (1, 1 << 20, 9 << 20):\n"
        "        tensor = torch.arange(numel)\n"
        "        swapper.swap_out(str(numel), tensor)\n"
        "        assert torch.equal(swapper.swap_in(str(numel)), tensor)\n"
        "    (path,) = folder.rglob('tensors.swp')\n"
        "    print(path.stat().st_size >= 10 << 23)\n",
        tmp_path,
    )
    assert told.strip() == "True"
