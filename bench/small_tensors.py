"""Many small tensors by name, beside fio at random places of the same size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fio import Fio, Job
from large import FIO_ENGINES
from report import Report, Samples

from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.cli.bench.usage import Stopwatch
from nvmeswap.config import AioConfig
from nvmeswap.io.probe import probe_folder
from nvmeswap.swap.tensors import TensorSwapper

_WAYS = ("read", "write")


@dataclass(frozen=True)
class Load:
    """`count` tensors of `nbytes` are moved at a time; `spread` times as many are stored."""

    name: str
    nbytes: int
    count: int
    spread: int = 2

    @property
    def stored_count(self) -> int:
        return self.count * self.spread


class Swapped:
    """Stored tensors, with memory to write from and read into, made beforehand and aligned."""

    def __init__(self, folder: Path, load: Load, *, queue_depth: int) -> None:
        self._nbytes = load.nbytes * load.count
        self._source = Memory(self._nbytes * load.spread, registered=True)
        self._destination = Memory(self._nbytes * load.spread, registered=True)
        keys = [str(number) for number in range(load.stored_count)]
        self._tensors = _by_key(keys, self._source.tensor, load.nbytes)
        self._outs = _by_key(keys, self._destination.tensor, load.nbytes)
        self._swapper = TensorSwapper(folder, aio=AioConfig(queue_depth=queue_depth))
        self._swapper.swap_out_many(self._tensors)
        self._neighbours = keys[: load.count]
        self._scattered = keys[:: load.spread]

    def scattered(self) -> Samples:
        """Every second one, or whatever the spread is, in random order."""
        return self._both(random.sample(self._scattered, len(self._scattered)))

    def neighbours(self) -> Samples:
        """One after the other, as they were stored."""
        return self._both(self._neighbours)

    def _both(self, keys: Sequence[str]) -> Samples:
        tensors = {key: self._tensors[key] for key in keys}
        outs = {key: self._outs[key] for key in keys}
        watch = Stopwatch()
        self._swapper.swap_out_many(tensors)
        write = watch.usage(self._nbytes)
        watch = Stopwatch()
        self._swapper.swap_in_many(keys, out=outs)
        return {"write": write, "read": watch.usage(self._nbytes)}

    def close(self) -> None:
        self._swapper.close()
        del self._tensors, self._outs
        self._source.close()
        self._destination.close()


def _by_key(keys: Sequence[str], memory: torch.Tensor, nbytes: int) -> dict[str, torch.Tensor]:
    return dict(zip(keys, memory.split(nbytes), strict=True))


def measure_operations(
    report: Report, fio: Fio, folder: Path, load: Load, *, fio_s: float, suffix: str = ""
) -> None:
    """`ops_..._over_fio` and `ops_..._neighbours_over_fio`, each way. fio runs for `fio_s` in a
    file as large as all that is stored, in several ways of its own: the best over all counts."""
    depth = 32
    probe = probe_folder(folder)
    file = TrialFile(folder, load.nbytes * load.stored_count, probe)
    engine = FIO_ENGINES[probe.backend]
    fio_ways = {"single": (engine, False), "batched": ("io_uring", True)}
    if engine != "io_uring":
        fio_ways["uring"] = ("io_uring", False)
    jobs = {
        f"{way} {fio_way}": Job(file.path, file.nbytes, f"rand{way}", load.nbytes, depth, engine,
                                direct=probe.direct, batched=batched, runtime_s=fio_s)
        for way in _WAYS
        for fio_way, (engine, batched) in fio_ways.items()
    }
    ours = Swapped(folder, load, queue_depth=depth)
    found = report.rounds(f"operations {load.name}{suffix}", {
        "fio": lambda: fio.run(jobs),
        "scattered": ours.scattered,
        "neighbours": ours.neighbours,
    })
    ours.close()
    file.path.unlink()
    for way in _WAYS:
        best = max((f"{way} {each}" for each in fio_ways), key=lambda job: found.median("fio", job))
        for variant, name in (("scattered", load.name), ("neighbours", f"{load.name}_neighbours")):
            ratio = found.ratio_of((variant, way), ("fio", best))
            report.figure(f"ops_{name}_over_fio_{way}{suffix}", ratio)


def measure_cost_of_one(report: Report, folder: Path, count: int) -> None:
    """`us_per_tensor_N`: of 4 KiB tensors, N at a time; the mean of writing and reading."""
    load = Load("4k", 4096, count, spread=1)
    ours = Swapped(folder, load, queue_depth=32)
    found = report.rounds(f"one of {count}", {"ours": ours.scattered})
    ours.close()
    costs_us = {
        way: found.median("ours", way, lambda usage: usage.wall_s / count * 1e6) for way in _WAYS
    }
    report.figure(f"us_per_tensor_{count}", sum(costs_us.values()) / 2)
    for way, cost_us in costs_us.items():
        report.figure(f"us_per_tensor_{count}_{way}", cost_us)
