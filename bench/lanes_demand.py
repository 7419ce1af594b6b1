"""A demand read behind a queue of prefetch and writeback, and what that costs the queue.

A timer chooses the moments: whoever asks when something has just ended finds room.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from large import QUEUE_DEPTH
from report import Report

from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.errors import SwapCancelledError
from nvmeswap.io.engine import Engine, Lane
from nvmeswap.io.probe import probe_folder
from nvmeswap.io.request import Request

_SIZES = {"64k": 64 << 10, "1m": 1 << 20, "16m": 16 << 20}
_QUEUED_NBYTES = 1 << 30
_PIECE_NBYTES = 16 << 20
_PAUSE_S = (0.005, 0.025)
# A demand limits the background for a second; alone means later than that.
_QUIET_S = 1.1


class Background:
    """A GiB of prefetch and a GiB of writeback queued, for as long as `fill` is called."""

    def __init__(self, engine: Engine, folder: Path, nbytes: int) -> None:
        probe = probe_folder(folder)
        self._engine = engine
        self._memory = Memory(2 * _PIECE_NBYTES, registered=True)
        engine.register_memory(self._memory.tensor)
        self._lanes: list[tuple[Lane, deque[Request], Iterator[int]]] = []
        self._files = []
        for lane in (Lane.PREFETCH, Lane.WRITEBACK):
            own = folder / lane.name.lower()
            own.mkdir()
            trial = TrialFile(own, nbytes, probe)
            self._files.append(engine.open(
                trial.path, offset_alignment_nbytes=probe.offset_alignment_nbytes,
                memory_alignment_nbytes=probe.memory_alignment_nbytes,
            ))
            self._lanes.append((lane, deque(), _round_and_round(nbytes)))
        self.read_file = self._files[0]

    def fill(self) -> None:
        """Queue as much as has ended since the last call."""
        for (lane, queue, offsets), file, memory in zip(
            self._lanes, self._files, self._memory.tensor.split(_PIECE_NBYTES), strict=True
        ):
            start = self._engine.write if lane is Lane.WRITEBACK else self._engine.read
            while queue and queue[0].done():
                queue.popleft().wait()
            while len(queue) < _QUEUED_NBYTES // _PIECE_NBYTES:
                queue.append(start(file, next(offsets), memory, lane=lane))

    def drain(self) -> None:
        """Drop what has not gone to the drive, wait for the rest."""
        for _, queue, _ in self._lanes:
            for request in queue:
                request.cancel()
            for request in queue:
                with contextlib.suppress(SwapCancelledError):
                    request.wait()
            queue.clear()

    def moved_nbytes(self) -> int:
        stats = self._engine.stats()
        return (stats.read_direct_nbytes + stats.read_buffered_nbytes
                + stats.write_direct_nbytes + stats.write_buffered_nbytes)

    def close(self) -> None:
        self.drain()
        for file in self._files:
            file.close()
        self._engine.unregister_memory(self._memory.tensor)
        self._memory.close()


def _round_and_round(nbytes: int) -> Iterator[int]:
    while True:
        yield from range(0, nbytes, _PIECE_NBYTES)


class Asker:
    """Demand reads at chosen moments, with the background's speed meanwhile."""

    def __init__(self, engine: Engine, background: Background, memory: Memory, nbytes: int) -> None:
        self._engine = engine
        self._background = background
        self._memory = memory.tensor
        self._file_nbytes = nbytes

    def phase(self, size: str, count: int, *, behind: bool, ask: bool) -> tuple[float, float]:
        """Median seconds of `count` reads of a size, and the background's bytes a second. `behind`:
        there is a background. `ask`: else only the background moves, for as many pauses."""
        times_s: list[float] = []
        if behind:
            self._background.fill()
        begin_s, begin_nbytes = time.perf_counter(), self._background.moved_nbytes()
        for _ in range(count):
            time.sleep(random.uniform(*_PAUSE_S))
            if behind:
                self._background.fill()
            if ask:
                times_s.append(self._read(_SIZES[size]))
        asked_nbytes = _SIZES[size] * len(times_s)
        moved_nbytes = self._background.moved_nbytes() - begin_nbytes - asked_nbytes
        rate = moved_nbytes / (time.perf_counter() - begin_s)
        self._background.drain()
        return statistics.median(times_s) if times_s else 0.0, rate

    def _read(self, nbytes: int) -> float:
        offset_bytes = random.randrange(0, self._file_nbytes - nbytes, 4096)
        begin_s = time.perf_counter()
        self._engine.read(self._background.read_file, offset_bytes, self._memory[:nbytes]).wait()
        return time.perf_counter() - begin_s


def measure_demand(report: Report, folder: Path, *, sample_count: int, nbytes: int) -> None:
    """For each size `demand_..._over_idle` and `background_with_demand_..._over_alone`, and
    `demand_over_idle`, the worst of the former. `sample_count` reads a size and round."""
    over_idle: dict[str, list[float]] = {name: [] for name in _SIZES}
    over_alone: dict[str, list[float]] = {name: [] for name in _SIZES}
    with Engine(
        backend=probe_folder(folder).backend, queue_depth=QUEUE_DEPTH
    ) as engine, Memory(max(_SIZES.values()), registered=True) as memory:
        engine.register_memory(memory.tensor)
        background = Background(engine, folder, nbytes)
        asker = Asker(engine, background, memory, nbytes)
        for number in range(report.round_count):
            for name in _SIZES:
                idle_s, _ = asker.phase(name, sample_count, behind=False, ask=True)
                behind_s, beside_rate = asker.phase(name, sample_count, behind=True, ask=True)
                time.sleep(_QUIET_S)
                _, alone_rate = asker.phase(name, sample_count, behind=True, ask=False)
                over_idle[name].append(behind_s / idle_s)
                over_alone[name].append(beside_rate / alone_rate)
                report.runs.append({
                    "section": "demand", "round": number, "size": name, "idle_s": idle_s,
                    "behind_s": behind_s, "beside_bytes_per_s": beside_rate,
                    "alone_bytes_per_s": alone_rate,
                })
        background.close()
    for name, ratios in over_idle.items():
        report.figure(f"demand_{name}_over_idle", statistics.median(ratios))
    report.figure("demand_over_idle", max(map(statistics.median, over_idle.values())))
    for name, ratios in over_alone.items():
        report.figure(f"background_with_demand_{name}_over_alone", statistics.median(ratios))
