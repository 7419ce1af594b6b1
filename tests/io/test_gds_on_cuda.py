"""The backend gds on a real GPU and drive. Whatever cuFile says of the drive, every byte is right:
where it refuses, the engine's own copies move them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapChecksumError, SwapClosedError, SwapUsageError
from nvmeswap.io import Engine, File, Lane, probe_folder
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.digest import digest, digests
from nvmeswap.io.gds import probe_gds
from nvmeswap.memory.device_arena import DeviceArena
from nvmeswap.memory.pool import Pool, SlotClass
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Checksum, Store
from nvmeswap.swap.space import Placement, SwapSpace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

MiB = 1 << 20
POISON, GUARD = 0xAA, 0x5C
PAGE = 4096
# One more than the engine registers: what is moved of the last one is bounced, without a refusal.
FILE_COUNT = 65


@pytest.fixture
def arena() -> Iterator[DeviceArena]:
    arena = DeviceArena(32 * MiB, torch.device("cuda"))
    arena.memory.fill_(GUARD)
    yield arena
    arena.close()


@pytest.fixture
def engine(arena: DeviceArena) -> Iterator[Engine]:
    with Engine(backend="gds", thread_count=8) as engine:
        assert engine.register_memory(arena.memory) == arena.nbytes
        yield engine


def open_sized(engine: Engine, path: Path, nbytes: int = 16 * MiB) -> File:
    path.touch()
    os.truncate(path, nbytes)
    return engine.open(path)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes + seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def round_trip(engine: Engine, file: File, part: torch.Tensor, offset: int, seed: int = 0) -> None:
    """Through the file, with a poisoned destination."""
    source = random_bytes(part.numel(), seed)
    part.copy_(source)
    torch.cuda.current_stream(part.device).synchronize()
    engine.write(file, offset, part).wait()
    with file.path.open("rb") as opened:
        on_drive = os.pread(opened.fileno(), part.numel(), offset)
    assert torch.equal(torch.frombuffer(bytearray(on_drive), dtype=torch.uint8), source)
    part.fill_(POISON)
    torch.cuda.current_stream(part.device).synchronize()
    engine.read(file, offset, part).wait()
    assert torch.equal(part.cpu(), source)


def test_probe_says_what_works_or_why_not(tmp_path: Path) -> None:
    """Else a run finds out with its first save.  field case G01, G02, G03"""
    found = probe_gds(tmp_path)
    assert (found.mode is None) == bool(found.reason), found
    assert list(tmp_path.iterdir()) == []
    print(found)


@pytest.mark.parametrize("nbytes", (PAGE, 64 << 10, MiB, 5 * MiB, 8 * MiB + PAGE))
def test_bytes_come_back_and_neighbours_on_the_device_stay(
    arena: DeviceArena, engine: Engine, tmp_path: Path, nbytes: int
) -> None:
    """Else a transfer writes beyond its buffer, or serves stale bytes.  field case G01"""
    file = open_sized(engine, tmp_path / "a.swp")
    begin = 3 * PAGE
    round_trip(engine, file, arena.memory[begin : begin + nbytes], 2 * PAGE)
    assert bool((arena.memory[:begin] == GUARD).all())
    assert bool((arena.memory[begin + nbytes :] == GUARD).all())
    stats = engine.stats()
    assert stats.gpudirect_nbytes + stats.device_bounced_nbytes >= 2 * nbytes
    if engine.gds_refusal is None:
        assert stats.device_bounced_nbytes == 0
    print(stats, engine.gds_refusal)


def test_many_files_come_back_also_that_which_is_not_registered(
    arena: DeviceArena, engine: Engine, tmp_path: Path
) -> None:
    """Else the engine's own copies to and from the GPU are never tried.  field case G02"""
    files = [open_sized(engine, tmp_path / f"{n}.swp") for n in range(FILE_COUNT)]
    for number, file in enumerate(files[:-1]):
        round_trip(engine, file, arena.memory[:PAGE], 0, seed=number)
    before = engine.stats().device_bounced_nbytes
    round_trip(engine, files[-1], arena.memory[PAGE : PAGE + 8 * MiB], PAGE)
    assert engine.stats().device_bounced_nbytes - before == 2 * 8 * MiB
    for number, file in enumerate(files[:-1]):
        arena.memory[:PAGE].fill_(POISON)
        torch.cuda.synchronize()
        engine.read(file, 0, arena.memory[:PAGE]).wait()
        assert torch.equal(arena.memory[:PAGE].cpu(), random_bytes(PAGE, number)), number


def test_small_pieces_of_host_and_device_with_gaps_keep_to_their_places(
    arena: DeviceArena, engine: Engine, tmp_path: Path
) -> None:
    source = random_bytes(4 * MiB)
    path = tmp_path / "a.swp"
    path.write_bytes(source.numpy().tobytes())
    file = engine.open(path)
    offsets = [number * 12288 for number in range(64)]
    buffers = [
        torch.full((5000,), POISON, dtype=torch.uint8) if number % 4 == 3
        else arena.memory[number * 8192 : number * 8192 + 8192]
        for number in range(64)
    ]
    for buffer in buffers:
        buffer.fill_(POISON)
    torch.cuda.synchronize()
    engine.read_many(file, offsets, buffers).wait()
    for offset, buffer in zip(offsets, buffers, strict=True):
        assert torch.equal(buffer.cpu(), source[offset : offset + buffer.numel()]), offset


def test_threads_with_memory_and_files_of_their_own_get_their_bytes(tmp_path: Path) -> None:
    """Else threads share a stream or a bounce block."""
    wrong: list[BaseException] = []

    def work(engine: Engine, number: int) -> None:
        try:
            arena = DeviceArena(4 * MiB, torch.device("cuda"))
            engine.register_memory(arena.memory)
            file = open_sized(engine, tmp_path / f"{number}.swp")
            for turn in range(4):
                round_trip(engine, file, arena.memory, number * PAGE, seed=turn * 10 + number)
            engine.unregister_memory(arena.memory)
            arena.close()
        except BaseException as error:
            wrong.append(error)

    with Engine(backend="gds", thread_count=8) as engine:
        threads = [threading.Thread(target=work, args=(engine, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_engines_come_and_go_and_files_outlive_none_of_them(tmp_path: Path) -> None:
    """Else handles of an engine that is closed are left, and the next one is refused."""
    arena = DeviceArena(4 * MiB, torch.device("cuda"))
    for turn in range(4):
        with Engine(backend="gds", thread_count=4) as engine:
            engine.register_memory(arena.memory)
            file = open_sized(engine, tmp_path / "a.swp")
            round_trip(engine, file, arena.memory, 0, seed=turn)
            file.close()
            again = open_sized(engine, tmp_path / "b.swp")
            round_trip(engine, again, arena.memory, 0, seed=turn)
        with pytest.raises(SwapClosedError):
            engine.read(again, 0, arena.memory)
    arena.close()


def test_memory_goes_with_the_last_view() -> None:
    """Else an arena leaks, or a view of a closed one is somebody else's memory."""
    whole_nbytes = torch.cuda.get_device_properties(0).total_memory
    nbytes = padded_nbytes(whole_nbytes // 16, PAGE)
    for _ in range(20):  # together more than there is
        arena = DeviceArena(nbytes, torch.device("cuda"))
        assert arena.memory.data_ptr() % PAGE == 0
        assert (arena.memory.dtype, arena.memory.numel()) == (torch.uint8, nbytes)
        pool = Pool(arena.memory, [SlotClass(8 * MiB, 4)], name="device")
        slot = pool.acquire(8 * MiB, holder="test", timeout_s=1.0)
        slot.memory.fill_(GUARD)
        arena.close()
        arena.close()
        assert bool((slot.memory == GUARD).all())
        slot.release()
        del slot, pool
        gc.collect()


def test_sums_of_device_memory_are_those_of_its_bytes(arena: DeviceArena) -> None:
    """Else a store can't check what it has read to the GPU."""
    host = random_bytes(20 * MiB + 7)
    device = arena.memory[: host.numel()]
    device.copy_(host)
    torch.cuda.synchronize()
    assert digest(device) == digest(host)
    assert digest(device[: 8 * MiB]) == digest(host[: 8 * MiB])
    bounds = [(0, 10), (10, 4096), (8192, 8192 + 100_001), (0, 9 * MiB), (100, 100)]
    parts = [device[begin:end] for begin, end in bounds]
    assert digests(parts) == digests([host[begin:end] for begin, end in bounds])
    assert digests([parts[0], host, parts[1]]) == digests([host[:10], host, host[10:4096]])


def test_store_checks_what_it_reads_to_the_device(
    arena: DeviceArena, engine: Engine, tmp_path: Path
) -> None:
    """Else stale bytes on the GPU are taken for the state.  field case G01"""
    store = Store(tmp_path, run="run", rank=0, world_size=1, engine=engine,
                  probe=probe_folder(tmp_path), checksum=Checksum.ALL)
    sizes = {"small": 64 << 10, "large": 20 * MiB}
    store.create_file("a.swp", {
        key: TensorSpec(torch.uint8, (nbytes,), (1,)) for key, nbytes in sizes.items()
    })
    for key, nbytes in sizes.items():
        source = random_bytes(nbytes)
        memory = arena.memory[:nbytes]
        memory.copy_(source)
        torch.cuda.synchronize()
        store.write(key, memory, lane=Lane.WRITEBACK).wait()
        memory.fill_(POISON)
        torch.cuda.synchronize()
        store.read(key, memory, lane=Lane.DEMAND).wait()
        assert torch.equal(memory.cpu(), source)
    assert store.stats().verified_nbytes == sum(sizes.values())
    spoil(store.path("small"), b"\x00" * 512)
    with pytest.raises(SwapChecksumError):
        store.read("small", arena.memory[: sizes["small"]], lane=Lane.DEMAND).wait()
    store.close()


def spoil(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def test_buffers_that_can_not_be_served_are_refused(
    arena: DeviceArena, engine: Engine, tmp_path: Path
) -> None:
    """Else the processor copies device memory, which ends the process."""
    file = open_sized(engine, tmp_path / "a.swp")
    strange = torch.empty(MiB, dtype=torch.uint8, device="cuda")
    for buffer, offset in ((arena.memory[1 : PAGE + 1], 0), (arena.memory[:100], 0),
                           (arena.memory[:PAGE], 512), (strange, 0)):
        with pytest.raises(SwapUsageError):
            engine.read(file, offset, buffer)
    with Engine(backend="posix") as other, pytest.raises(SwapUsageError):
        other.register_memory(arena.memory)


def test_space_uses_what_the_probe_has_found(tmp_path: Path) -> None:
    """Else the setting has no effect, and nobody says so."""
    found = probe_gds(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        space = SwapSpace(Placement((tmp_path,), "run"), {}, swap=SwapBlock(),
                          aio=AioConfig(use_gds=True), pin_memory=True)
    assert space.uses_gds == (found.mode is not None), [str(each.message) for each in told]
    assert space.engine is not None
    assert (space.engine.backend == "gds") == space.uses_gds
    assert sum("use_gds" in str(each.message) for each in told) == (not space.uses_gds)
    space.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_share_an_engine(tmp_path: Path) -> None:
    """Else a thread's stream belongs to the other GPU."""
    arenas = [DeviceArena(8 * MiB, torch.device("cuda", index)) for index in (0, 1)]
    with Engine(backend="gds", thread_count=2) as engine:
        for arena in arenas:
            engine.register_memory(arena.memory)
        for number in range(FILE_COUNT):  # the last ones are bounced
            file = open_sized(engine, tmp_path / f"{number}.swp")
            for arena in arenas:
                round_trip(engine, file, arena.memory[: 2 * MiB], 0, seed=number)


EXPANDABLE = """
import os, sys
from pathlib import Path
import torch
from nvmeswap.io import Engine
from nvmeswap.memory.device_arena import DeviceArena
path = Path(sys.argv[1])
path.touch(); os.truncate(path, 64 << 20)
NBYTES = 32 << 20
theirs = torch.empty(NBYTES + 4096, dtype=torch.uint8, device="cuda")
begin = -theirs.data_ptr() % 4096
arena = DeviceArena(NBYTES, theirs.device)
with Engine(backend="gds", thread_count=8) as engine:
    file = engine.open(path)
    for memory in (arena.memory, theirs[begin : begin + NBYTES]):
        engine.register_memory(memory)
        source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
        memory.copy_(source)
        torch.cuda.synchronize()
        engine.write(file, 4096, memory).wait()
        memory.fill_(0xAA)
        torch.cuda.synchronize()
        engine.read(file, 4096, memory).wait()
        assert torch.equal(memory.cpu(), source)
        print("right", engine.stats().gpudirect_nbytes, engine.gds_refusal)
    engine.unregister_memory(arena.memory)
"""


def test_expandable_segments_change_no_byte(tmp_path: Path) -> None:
    """Else memory that torch maps piece by piece can't be registered, and is served wrong.

    field case G07: the arena has an allocation of its own; torch's memory is right as well
    """
    option = "expandable_segments:True"
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE, str(tmp_path / "a.swp")], text=True, timeout=200,
        capture_output=True, check=False,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": option, "PYTORCH_ALLOC_CONF": option,
             "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2
    print(done.stdout)
