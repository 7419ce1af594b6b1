"""Looking for the best setting: each one on a grid, or one axis at a time.

Settings are measured in turns and the turns rotated, so that a drive that drifts, or is noisy for a
second, favours none.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nvmeswap.cli.bench.measuring import Setting

# Noise, mostly. Within it the fewer bytes in flight win: an urgent read waits for less.
_AS_GOOD = 0.97


@dataclass(frozen=True, slots=True)
class Axes:
    """What is to be tried."""

    backends: Sequence[str]
    block_nbytes: Sequence[int]
    queue_depths: Sequence[int]
    thread_count: int

    def settings(self) -> list[Setting]:
        return [
            Setting(backend, nbytes, depth, self.thread_count)
            for backend, nbytes, depth in itertools.product(
                self.backends, self.block_nbytes, self.queue_depths
            )
        ]


@dataclass(frozen=True, slots=True)
class Speeds:
    """GB/s of one setting."""

    read_gb_per_s: float
    write_gb_per_s: float

    @property
    def both_gb_per_s(self) -> float:
        """Of reading and writing the same bytes one after the other."""
        return 2 / (1 / self.read_gb_per_s + 1 / self.write_gb_per_s)


class Sweep:
    """Measured settings. `measure` takes one sample, `loops` of which make a figure."""

    def __init__(self, measure: Callable[[Setting], Speeds], loops: int) -> None:
        self._measure = measure
        self._loops = loops
        self._samples: dict[Setting, list[Speeds]] = {}

    def search_grid(self, axes: Axes) -> None:
        """Try every setting."""
        self._try(axes.settings())

    def search_coordinate(self, axes: Axes) -> None:
        """From the middle, go to the best block, depth and backend in turn, while that moves."""
        here = Setting(
            axes.backends[0],
            axes.block_nbytes[len(axes.block_nbytes) // 2],
            axes.queue_depths[len(axes.queue_depths) // 2],
            axes.thread_count,
        )
        seen: set[Setting] = set()
        while here not in seen:
            seen.add(here)
            for line in (
                [dataclasses.replace(here, block_nbytes=each) for each in axes.block_nbytes],
                [dataclasses.replace(here, queue_depth=each) for each in axes.queue_depths],
                [dataclasses.replace(here, backend=each) for each in axes.backends],
            ):
                self._try(line)
                here = self.best(line)

    def speeds(self) -> dict[Setting, Speeds]:
        """The median of each setting that was tried."""
        return {
            setting: Speeds(
                statistics.median(sample.read_gb_per_s for sample in samples),
                statistics.median(sample.write_gb_per_s for sample in samples),
            )
            for setting, samples in self._samples.items()
        }

    def best(self, among: Sequence[Setting] | None = None) -> Setting:
        """Fastest at reading and writing the same bytes; of those within 3 % the one with the
        fewest bytes in flight."""
        speeds = self.speeds()
        both = {each: speeds[each].both_gb_per_s for each in among or speeds}
        enough = _AS_GOOD * max(both.values())
        good = [setting for setting, speed in both.items() if speed >= enough]
        return min(good, key=lambda each: (each.block_nbytes * each.queue_depth, -both[each]))

    def _try(self, settings: Sequence[Setting]) -> None:
        untried = [each for each in settings if each not in self._samples]
        for loop in range(self._loops):
            for index in range(len(untried)):
                setting = untried[(index + loop) % len(untried)]
                self._samples.setdefault(setting, []).append(self._measure(setting))
