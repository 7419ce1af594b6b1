"""A DataLoader forks workers beside a registered arena: no copy, no harm, no leftovers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PRELUDE = """
import os, sys, torch
from pathlib import Path
from nvmeswap.errors import SwapForkError
from nvmeswap.io import Engine
from nvmeswap.memory.arena import Arena
MiB = 1 << 20
arena = Arena(256 * MiB, pin_memory=False)
engine = Engine(backend="uring")
assert engine.register_memory(arena.memory) > 0
file = engine.open(Path(sys.argv[1]))

def field(name, where="/proc/self/status"):
    return next(int(l.split()[1]) << 10 for l in open(where) if l.startswith(name))

def rings():
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum("io_uring" in os.readlink(link) for link in links if os.path.islink(link))

def ends_well(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run(program: str, path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", PRELUDE + program, str(path)], text=True,
                          capture_output=True, timeout=120, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_forked_worker_has_neither_arena_nor_ring(swap_path: Path) -> None:
    """Else four workers take four arenas more, a second of copying each, and the parent's pinned
    pages outlive its close."""
    program = """
resident = field("RssAnon")
assert rings() == 1
child = os.fork()
if child == 0:
    fine = rings() == 0 and field("RssAnon") < resident - 200 * MiB
    try:
        engine.register_memory(torch.zeros(4096))
        fine = False
    except SwapForkError:
        pass
    file.close()
    engine.close()
    os._exit(0 if fine else 1)
assert ends_well(child)
for place in arena.memory[:8 * MiB].split(MiB):
    engine.write(file, 0, place).wait()
print("fine")
"""
    assert run(program, swap_path) == "fine"


def test_parent_that_closes_beside_a_living_child_unpins_its_memory(swap_path: Path) -> None:
    """Else memlock stays used up, and the next engine registers nothing."""
    program = """
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    os.close(write_end)
    os.read(read_end, 1)
    os._exit(0)
assert field("VmPin") >= 256 * MiB
engine.close()
assert field("VmPin") == 0, field("VmPin")
os.close(write_end)
assert ends_well(child)
print("fine")
"""
    assert run(program, swap_path) == "fine"


def test_parent_that_forks_amid_transfers_keeps_every_byte(swap_path: Path) -> None:
    """Else a page that was copied at the fork misses what the disk delivers afterwards."""
    program = """
source = torch.randint(0, 256, (8 * MiB,), dtype=torch.uint8)
engine.write(file, 0, source).wait()
for step in range(20):
    place = arena.memory[step * 8 * MiB :][: 8 * MiB]
    place.zero_()
    requests = [engine.read(file, at, place[at : at + 65536]) for at in range(0, 8 * MiB, 65536)]
    child = os.fork()
    if child == 0:
        os._exit(0)
    for request in requests:
        request.wait()
    assert torch.equal(place, source), step
    assert ends_well(child)
print("fine")
"""
    assert run(program, swap_path) == "fine"


def test_data_loader_with_four_workers_beside_a_gibibyte_keeps_every_byte(swap_path: Path) -> None:
    """Else training with data workers takes five times its memory, or reads wrong weights."""
    program = """
import threading
from torch.utils.data import DataLoader, Dataset
big = Arena(1 << 30, pin_memory=False)
assert engine.register_memory(big.memory) == 1 << 30
source = torch.randint(0, 256, (4 * MiB,), dtype=torch.uint8)
engine.write(file, 0, source).wait()

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        try:
            engine.read(file, 0, torch.zeros(4096, dtype=torch.uint8))
        except SwapForkError:
            return field("RssAnon")
        return -1

stop, wrong, moved = threading.Event(), [], 0
def transfer():
    global moved
    while not stop.is_set() or moved < 32:
        place = big.memory[moved % 64 * 4 * MiB :][: 4 * MiB]
        place.fill_(0xAA)
        for request in [engine.read(file, at, place[at : at + 65536])
                        for at in range(0, 4 * MiB, 65536)]:
            request.wait()
        if not torch.equal(place, source):
            wrong.append(moved)
        moved += 1
thread = threading.Thread(target=transfer)
thread.start()
seen = []
for _ in range(3):  # each time four workers anew
    for batch in DataLoader(Samples(), batch_size=4, num_workers=4):
        seen += batch.tolist()
stop.set()
thread.join()
assert not wrong and len(seen) == 192 and min(seen) >= 0, (wrong, seen)
assert max(seen) < field("RssAnon") - (1 << 30), "a worker holds the arena"
print("fine")
"""
    assert run(program, swap_path) == "fine"
