"""What swap memory takes beyond what was asked for, and what it costs a fork."""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
from pathlib import Path

from report import Report

from nvmeswap.io.engine import Engine
from nvmeswap.io.probe import probe_folder
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.memory.pool import Pool

_FORK_COUNT = 9


def measure_memory(report: Report, folder: Path, *, arena_nbytes: int) -> None:
    """`pinned_over_requested` for 1000 tensors of odd sizes between 64 KB and 2 MB, and `fork_ms`
    beside a registered arena."""
    sizes = [random.Random(index).randrange(64_000, 2_000_000) | 1 for index in range(1000)]
    classes = exact_slot_classes(sizes)
    arena = Arena(Pool.nbytes_needed(classes))
    Pool(arena.memory, classes, name="bench")
    report.figure("pinned_over_requested", (arena.locked_nbytes or arena.nbytes) / sum(sizes))
    if not arena.locked_nbytes:
        report.note("the arena could not be page-locked here; its size was taken")
    arena.close()

    report.figure("fork_without_arena_ms", _fork_ms())
    arena = Arena(arena_nbytes, pin_memory=False)
    with Engine(backend=probe_folder(folder).backend) as engine:
        registered_nbytes = engine.register_memory(arena.memory)
        if registered_nbytes < arena_nbytes:
            report.note(f"fork: {registered_nbytes:_} of {arena_nbytes:_} bytes were registered")
        report.figure("fork_ms", _fork_ms())
    arena.close()


def _fork_ms() -> float:
    """How long `fork` keeps its caller."""
    times_ms = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        for _ in range(_FORK_COUNT):
            begin_s = time.perf_counter()
            child = os.fork()
            if child == 0:
                os._exit(0)
            times_ms.append((time.perf_counter() - begin_s) * 1e3)
            os.waitpid(child, 0)
    return statistics.median(times_ms)
