"""Registered memory and files change what transfers cost, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapClosedError, SwapUsageError
from nvmeswap.io import Engine, File
from nvmeswap.memory.arena import Arena

MakeBytes = Callable[..., torch.Tensor]
MiB = 1 << 20
BACKENDS = ("uring", "aio", "posix", "skeleton", "fault")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * MiB, pin_memory=False)
    yield arena
    arena.close()


def assert_exact(engine: Engine, file: File, memory: torch.Tensor, source: torch.Tensor) -> None:
    """Write from `memory` and read back into it, at odd places too, across any border in it."""
    for start, nbytes in ((0, 5 * MiB), (4096, 5 * MiB + 7), (511, 3 * MiB), (3 * MiB - 512, 1024)):
        place = memory[start : start + nbytes]
        place.copy_(source[:nbytes])
        engine.write(file, 8192, place).wait()
        place.fill_(0xAA)
        engine.read(file, 8192, place).wait()
        assert torch.equal(place, source[:nbytes]), (start, nbytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transfers_within_beside_and_across_registered_pieces_are_exact(
    swap_path: Path, arena: Arena, random_bytes: MakeBytes, backend: str
) -> None:
    """Else a block that straddles two pieces fails (EFAULT), or lands beside its place."""
    source = random_bytes(6 * MiB)
    with Engine(backend=backend) as engine:
        file = engine.open(swap_path)
        # Borders at 1 MiB, at an address that no block may end at, and before the arena's end.
        pieces = (arena.memory[:MiB], arena.memory[MiB : 3 * MiB - 100],
                  arena.memory[3 * MiB - 100 : 6 * MiB])
        for piece in pieces:
            assert engine.register_memory(piece) == (piece.nbytes if backend == "uring" else 0)
        assert engine.stats().registered_nbytes == (6 * MiB if backend == "uring" else 0)
        assert_exact(engine, file, arena.memory, source)
        engine.unregister_memory(pieces[1])
        assert_exact(engine, file, arena.memory, source)
        for piece in pieces:
            engine.unregister_memory(piece)
        assert engine.stats().registered_nbytes == 0
        assert_exact(engine, file, arena.memory, source)


def test_registered_transfers_under_faults_are_exact(
    swap_path: Path, arena: Arena, random_bytes: MakeBytes
) -> None:
    """Else a short fixed transfer is resumed at the wrong place."""
    script = "any 3 short 4096; any 5 errno 11; any 7 busy; read 2 errno 4; write 9 short 70000"
    with Engine(backend="uring", fault_script=script, block_nbytes=256 << 10) as engine:
        file = engine.open(swap_path)
        assert engine.register_memory(arena.memory) == arena.nbytes
        assert_exact(engine, file, arena.memory, random_bytes(6 * MiB))
        assert engine.stats().retry_count > 0


def test_registering_twice_or_too_late_is_told(arena: Arena) -> None:
    """Else memory is pinned twice, or a closed engine hangs the caller."""
    engine = Engine(backend="uring")
    engine.register_memory(arena.memory)
    with pytest.raises(SwapUsageError):
        engine.register_memory(arena.memory)
    assert engine.register_memory(torch.empty(0)) == 0
    engine.close()
    with pytest.raises(SwapClosedError):
        engine.register_memory(arena.memory)


SMALL_LIMIT_PROGRAM = """
import os, resource, sys
from pathlib import Path
import torch
from nvmeswap.io import Engine
from nvmeswap.memory.arena import Arena
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
arena = Arena(32 << 20, pin_memory=False)
os.seteuid(65534)  # a ring made without CAP_IPC_LOCK is held to the limit
engine = Engine(backend="uring")
os.seteuid(0)
file = engine.open(Path(sys.argv[1]))
nbytes = engine.register_memory(arena.memory)
more = engine.register_memory(torch.zeros(16 << 20, dtype=torch.uint8))
source = torch.arange(16 << 20, dtype=torch.int32).to(torch.uint8)
for start in (0, 777):
    place = arena.memory[start : start + source.nbytes]
    place.copy_(source)
    engine.write(file, 0, place).wait()
    place.fill_(7)
    engine.read(file, 0, place).wait()
    assert torch.equal(place, source)
engine.close()
print(0 < nbytes < 8 << 20, more < 8 << 20)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_user_with_a_small_memlock_limit_registers_what_fits(swap_path: Path) -> None:
    """Else swapping needs `ulimit -l unlimited`, or fails with "Cannot allocate memory"."""
    program = SMALL_LIMIT_PROGRAM
    done = subprocess.run([sys.executable, "-c", program, str(swap_path)], text=True, check=False,
                          capture_output=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr


def is_open_anywhere(path: Path) -> bool:
    """A write lease is given only on a file that nobody else has open."""
    with path.open("r+b") as other:
        try:
            fcntl.fcntl(other, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            assert error.errno == errno.EAGAIN
            return True
        fcntl.fcntl(other, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


@pytest.mark.parametrize("backend", BACKENDS)
def test_closer_of_a_file_lets_go_of_it_while_the_engine_lives(
    swap_path: Path, random_bytes: MakeBytes, backend: str
) -> None:
    """Else a deleted swap file keeps its space on the drive until the run ends."""
    with Engine(backend=backend) as engine:
        file = engine.open(swap_path)
        engine.write(file, 0, random_bytes(4096)).wait()
        assert is_open_anywhere(swap_path)
        file.close()
        deadline = time.monotonic() + 10
        while is_open_anywhere(swap_path):
            assert time.monotonic() < deadline


def test_user_of_more_files_than_the_table_holds_gets_all_of_them(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """Else the 65th file fails, or is taken for another."""
    with Engine(backend="uring") as engine:
        for round_number in range(2):
            files = []
            for number in range(100):
                path = tmp_path / f"{round_number}-{number}.swp"
                path.touch()
                os.truncate(path, 4096)
                files.append(engine.open(path))
            sources = [random_bytes(4096 - number) for number in range(100)]
            for file, source in zip(files, sources, strict=True):
                engine.write(file, 0, source).wait()
            for file, source in zip(files, sources, strict=True):
                destination = torch.empty_like(source)
                engine.read(file, 0, destination).wait()
                assert torch.equal(source, destination)
                assert file.path.read_bytes()[: source.nbytes] == source.numpy().tobytes()
                file.close()


def test_file_used_by_two_engines_outlives_either(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else an engine looks a file up in the other one's table."""
    source, destination = random_bytes(70_000), torch.empty(70_000, dtype=torch.uint8)
    first, second = Engine(backend="uring"), Engine(backend="uring")
    file = first.open(swap_path)
    first.write(file, 0, source).wait()
    second.read(file, 0, destination).wait()
    first.close()
    assert torch.equal(source, destination)
    destination.zero_()
    second.read(file, 0, destination).wait()
    file.close()
    second.close()
    assert torch.equal(source, destination)
