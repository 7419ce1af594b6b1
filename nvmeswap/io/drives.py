"""Several drives: how fast each is, and which share of the stripes it gets.

Measured, not asked: what a drive's data sheet or the kernel says is not what a folder on it gives,
behind a controller, a filesystem and other jobs. A drive's time for a byte written and read again
is what counts, because training writes about as much as it reads.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nvmeswap.io import native
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.engine import Engine
from nvmeswap.io.file import DirectMode, File
from nvmeswap.io.probe import FolderProbe, probe_folder, trial_file

_MEASURED_NBYTES = 64 << 20
_PIECE_NBYTES = 8 << 20
_TURNS = 3
_PAGE_NBYTES = 4096
# A shorter row is taken if its speed is that near to what the drives give together. Two measures of
# one drive differ by as much, and drives that are alike should get equal shares.
_GOOD_ENOUGH = 0.95


class SlowDriveWarning(UserWarning):
    """A drive among several is so slow that the others would be faster without it."""


def probe_folders(
    folders: Sequence[Path], *, backend: str = "auto", direct: DirectMode = DirectMode.PREFER
) -> FolderProbe:
    """Probe each folder (`probe_folder`), and give each a weight by its measured bandwidth.

    One folder is probed and not measured. Several are measured in turn, by writing and reading
    64 MiB a few times, which takes each drive as long as 450 MiB. A backend that one of them
    refuses is used for none. Warns (`SlowDriveWarning`) of a drive that slows the others down.

    Raises what `probe_folder` raises, and SwapIOError naming a file in the folder where measuring
    failed.
    """
    probes = [probe_folder(folder, backend=backend, direct=direct) for folder in folders]
    if len(probes) == 1:
        return probes[0]
    if len({probe.backend for probe in probes}) > 1:  # threads work everywhere
        probes = [probe_folder(folder, backend="posix", direct=direct) for folder in folders]
    speeds = measure_bandwidths(probes)
    together = [2 / (1 / read + 1 / write) for read, write in speeds]
    weights = weights_of(together)
    _warn_of_slow_drives(folders, together, weights)
    return replace(
        probes[0],
        direct=all(probe.direct for probe in probes),
        offset_alignment_nbytes=max(probe.offset_alignment_nbytes for probe in probes),
        memory_alignment_nbytes=max(probe.memory_alignment_nbytes for probe in probes),
        drives=tuple(
            replace(probe.drives[0], weight=weight, read_nbytes_per_s=read,
                    write_nbytes_per_s=write)
            for probe, weight, (read, write) in zip(probes, weights, speeds, strict=True)
        ),
    )


def measure_bandwidths(probes: Sequence[FolderProbe]) -> list[tuple[float, float]]:
    """Bytes a second of reading and of writing in each folder, with all of a queue in flight.

    The folders take turns, and the best turn of each counts: so what others do meanwhile weighs
    least. The probes have one backend. Raises SwapIOError, SwapTimeoutError, SwapPathError. Blocks;
    leaves nothing behind.
    """
    best = [(0.0, 0.0)] * len(probes)
    with contextlib.ExitStack() as stack, Engine(backend=probes[0].backend) as engine:
        trials = [stack.enter_context(_opened_trial(engine, probe)) for probe in probes]
        for trial in trials:
            trial.write()  # fresh space is slower on some storage
        for _ in range(_TURNS):
            for index, trial in enumerate(trials):
                write, read = trial.write(), trial.read()
                best[index] = max(best[index][0], read), max(best[index][1], write)
    return best


@contextlib.contextmanager
def _opened_trial(engine: Engine, probe: FolderProbe) -> Iterator[_Trial]:
    with trial_file(probe.folder) as path, path.open("r+b") as descriptor:
        descriptor.truncate(_MEASURED_NBYTES)
        file = engine.open(
            path,
            direct=DirectMode.PREFER if probe.direct else DirectMode.OFF,
            offset_alignment_nbytes=probe.offset_alignment_nbytes,
            memory_alignment_nbytes=probe.memory_alignment_nbytes,
        )
        try:
            yield _Trial(engine, file, descriptor.fileno())
        finally:
            file.close()


class _Trial:
    """Moves a file's bytes and says how fast, in bytes a second. Where direct I/O is refused the
    page cache is written out and dropped, so that the drive is measured."""

    def __init__(self, engine: Engine, file: File, fd: int) -> None:
        self._engine = engine
        self._file = file
        self._fd = fd
        self._offsets = range(0, _MEASURED_NBYTES, _PIECE_NBYTES)
        self._pieces = [_random_page_aligned(_PIECE_NBYTES)] * len(self._offsets)

    def write(self) -> float:
        began_s = time.perf_counter()
        self._engine.write_many(self._file, self._offsets, self._pieces).wait()
        os.fdatasync(self._fd)
        return _MEASURED_NBYTES / (time.perf_counter() - began_s)

    def read(self) -> float:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        self._engine.read_many(self._file, self._offsets, self._pieces).wait()
        return _MEASURED_NBYTES / (time.perf_counter() - began_s)


def weights_of(speeds: Sequence[float]) -> tuple[int, ...]:
    """Stripes a row for drives of these speeds, at least one each: the shortest row that is nearly
    as fast as the drives together, or the fastest that the engine takes.

    Each further stripe goes to the drive that is the earliest to be done with it, which makes a
    row of any length as fast as it can be.
    """
    weights = [1] * len(speeds)
    best = tuple(weights)
    while sum(weights) < native.STRIPE_LIMIT and _speed(best, speeds) < _GOOD_ENOUGH * sum(speeds):
        first_done = min(range(len(speeds)), key=lambda i: (weights[i] + 1) / speeds[i])
        weights[first_done] += 1
        best = max(best, tuple(weights), key=lambda each: _speed(each, speeds))
    return best


def _speed(weights: Sequence[int], speeds: Sequence[float]) -> float:
    """Of a row, which is over when its slowest drive is."""
    slowest = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    return sum(weights) / slowest


def _warn_of_slow_drives(
    folders: Sequence[Path], speeds: Sequence[float], weights: Sequence[int]
) -> None:
    slowest = min(range(len(speeds)), key=lambda i: speeds[i])
    if _speed(weights, speeds) < sum(speeds) - speeds[slowest]:
        warnings.warn(
            f"{folders[slowest]} gives {speeds[slowest] / 1e6:.0f} MB/s, "
            f"{max(speeds) / speeds[slowest]:.0f} times less than the fastest drive: swapping "
            "would be faster without it",
            SlowDriveWarning, stacklevel=3,
        )


def _random_page_aligned(nbytes: int) -> torch.Tensor:
    """Some drives compress, so zeros would say nothing. The user's random numbers stay as they
    are."""
    memory = torch.empty(nbytes + _PAGE_NBYTES, dtype=torch.uint8, device="cpu")
    memory.random_(generator=torch.Generator())
    start = padded_nbytes(memory.data_ptr(), _PAGE_NBYTES) - memory.data_ptr()
    return memory[start : start + nbytes]
