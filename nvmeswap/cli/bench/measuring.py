"""Passes over a trial file, by the clock.

At any time two groups of blocks are under way, so that the engine's queue never runs dry while
Python waits for one.
"""

from __future__ import annotations

import enum
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.io.engine import Direction, DirectMode, Engine, Lane
from nvmeswap.io.request import Request
from nvmeswap.stats import EngineStats, LaneLatency

_GROUP_NBYTES = 64 << 20  # arbitrary: long enough for the engine to cut it as it likes


class Mode(enum.Enum):
    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """As many bytes read from the first half of the file as written to the second."""


class Pattern(enum.Enum):
    SEQUENTIAL = "sequential"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Setting:
    """How the engine is to move bytes: what `aio` says in the JSON, and the backend."""

    backend: str
    block_nbytes: int
    queue_depth: int
    thread_count: int


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are handed to the engine together, by number, all in one direction."""

    direction: Direction
    blocks: Sequence[int]


def memory_nbytes(setting: Setting, file_nbytes: int) -> int:
    """What `Session` needs to keep two groups of such blocks under way."""
    group_nbytes = max(_GROUP_NBYTES, setting.queue_depth * setting.block_nbytes)
    return 2 * max(setting.block_nbytes, min(group_nbytes, file_nbytes))


class Session:
    """An engine with the file open and the memory registered; passes over the file.

    Blocking: everything. Threads: one. Ownership: of the engine; `close` waits for what is in
    flight. `registered_nbytes` and `register_s` say what pinning did and took.
    """

    def __init__(
        self, file: TrialFile, setting: Setting, memory: Memory, direct: DirectMode
    ) -> None:
        self.setting = setting
        self._trial = file
        self._memory = memory.tensor
        self._engine = Engine(
            backend=setting.backend, block_nbytes=setting.block_nbytes,
            queue_depth=setting.queue_depth, thread_count=setting.thread_count,
        )
        try:
            begin_s = time.perf_counter()
            self.registered_nbytes = (
                self._engine.register_memory(memory.tensor) if memory.registered else 0
            )
            self.register_s = time.perf_counter() - begin_s
            self._file = self._engine.open(
                file.path, direct=direct,
                offset_alignment_nbytes=file.probe.offset_alignment_nbytes,
                memory_alignment_nbytes=file.probe.memory_alignment_nbytes,
            )
        except BaseException:
            self._engine.close()
            raise
        self._block_count = file.nbytes // setting.block_nbytes
        self._memory_blocks = memory.tensor.numel() // setting.block_nbytes

    def run(self, mode: Mode, pattern: Pattern) -> Usage:
        """One pass over the file. Of a file in the page cache the pages are dropped first."""
        plan = list(self._plan(mode, pattern))
        if not self._file.direct:
            self._trial.drop_cache()
        under_way: deque[Request] = deque()
        watch = Stopwatch()
        for number, group in enumerate(plan):
            if len(under_way) == 2:
                under_way.popleft().wait()
            first = number % 2 * (self._memory_blocks // 2)
            under_way.append(self._start(group, first, pattern))
        while under_way:
            under_way.popleft().wait()
        return watch.usage(sum(len(group.blocks) for group in plan) * self.setting.block_nbytes)

    def block_latency(self, mode: Mode, pattern: Pattern, most: int = 2048) -> LaneLatency:
        """How long single blocks take, from submission to the end, as the engine sees it; of the
        first so many of a pass, with up to as many in flight as the setting says. Call it once."""
        nbytes = self.setting.block_nbytes
        window = min(self.setting.queue_depth, self._memory_blocks)
        singles = ((group.direction, block) for group in self._plan(mode, pattern)
                   for block in group.blocks)
        in_flight: deque[Request] = deque()
        for number, (direction, block) in enumerate(itertools.islice(singles, most)):
            if len(in_flight) == window:
                in_flight.popleft().wait()
            first = number % window * nbytes
            start = self._engine.write if direction is Direction.WRITE else self._engine.read
            # No pass goes by this lane, so its counters are those of these blocks.
            in_flight.append(start(self._file, block * nbytes, self._memory[first : first + nbytes],
                                   lane=Lane.DEMAND))
        for request in in_flight:
            request.wait()
        return self._engine.stats().lanes[Lane.DEMAND.name.lower()]

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def gds_refusal(self) -> str | None:
        return self._engine.gds_refusal

    def close(self) -> None:
        self._file.close()
        self._engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _plan(self, mode: Mode, pattern: Pattern) -> Iterator[Group]:
        if mode is Mode.MIXED:
            half = self._block_count // 2
            reads = self._groups(Direction.READ, range(half), pattern)
            writes = self._groups(Direction.WRITE, range(half, 2 * half), pattern)
            for pair in zip(reads, writes, strict=True):
                yield from pair
        else:
            direction = Direction.READ if mode is Mode.READ else Direction.WRITE
            yield from self._groups(direction, range(self._block_count), pattern)

    def _groups(
        self, direction: Direction, blocks: Sequence[int], pattern: Pattern
    ) -> Iterator[Group]:
        most = max(1, self._memory_blocks // 2)
        if pattern is Pattern.RANDOM:
            blocks = random.sample(blocks, len(blocks))
            # The engine sorts what is submitted together, so no more than it keeps in flight.
            most = min(most, self.setting.queue_depth)
        for first in range(0, len(blocks), most):
            yield Group(direction, blocks[first : first + most])

    def _start(self, group: Group, first: int, pattern: Pattern) -> Request:
        """`first`: the block of memory where the group's begin."""
        nbytes = self.setting.block_nbytes
        memory = self._memory[first * nbytes : (first + len(group.blocks)) * nbytes]
        is_write = group.direction is Direction.WRITE
        lane = Lane.WRITEBACK if is_write else Lane.PREFETCH
        if pattern is Pattern.SEQUENTIAL:
            start = self._engine.write if is_write else self._engine.read
            return start(self._file, group.blocks[0] * nbytes, memory, lane=lane)
        start_many = self._engine.write_many if is_write else self._engine.read_many
        offsets_bytes = [block * nbytes for block in group.blocks]
        return start_many(self._file, offsets_bytes, memory.split(nbytes), lane=lane)
