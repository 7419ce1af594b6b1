"""What work takes: the clock and the processors."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What some work took, by the clock and of the processors; 1e9 bytes are a GB. Processor time
    is the whole process's, the engine's threads and the kernel's io workers for it included."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / 1e9 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


class Stopwatch:
    """Wall clock and processor time since it was made, children that have ended included."""

    def __init__(self) -> None:
        self._cpu_s = _cpu_s()
        self._begin_s = time.perf_counter()

    def usage(self, nbytes: int) -> Usage:
        wall_s = time.perf_counter() - self._begin_s
        return Usage(nbytes, wall_s, _cpu_s() - self._cpu_s)


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
