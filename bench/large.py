"""One large file: speed and processor time beside fio, and what registering memory brings."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

import torch
from fio import Fio, Job
from report import Report, Samples, Value, cpu, speed

from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.io.engine import Engine, Lane
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.io.request import Request
from nvmeswap.store.store import Checksum, Store, TensorSpec

BLOCK_NBYTES = 512 << 10
QUEUE_DEPTH = 32
_WAYS = ("read", "write")
_MEMORY_NBYTES = 1 << 30


class Mover:
    """An engine over an existing file, and an arena whose halves take turns."""

    def __init__(
        self, file: TrialFile, probe: FolderProbe, memory: Memory, *, register: bool
    ) -> None:
        self._nbytes = file.nbytes
        self._halves = memory.tensor.split(memory.tensor.numel() // 2)
        self._engine = Engine(backend=probe.backend, block_nbytes=BLOCK_NBYTES,
                              queue_depth=QUEUE_DEPTH)
        if register:
            self._engine.register_memory(memory.tensor)
        self._file = self._engine.open(
            file.path, offset_alignment_nbytes=probe.offset_alignment_nbytes,
            memory_alignment_nbytes=probe.memory_alignment_nbytes,
        )

    def both(self) -> Samples:
        """All of the file, once each way."""
        return {way: self._move(way) for way in _WAYS}

    def _move(self, way: str) -> Usage:
        start = self._engine.read if way == "read" else self._engine.write
        step_nbytes = self._halves[0].numel()
        under_way: deque[Request] = deque()
        watch = Stopwatch()
        for number, offset_bytes in enumerate(range(0, self._nbytes, step_nbytes)):
            if len(under_way) == 2:
                under_way.popleft().wait()
            under_way.append(start(self._file, offset_bytes, self._halves[number % 2]))
        for request in under_way:
            request.wait()
        return watch.usage(self._nbytes)

    def close(self) -> None:
        self._file.close()
        self._engine.close()


def measure_large(report: Report, fio: Fio, folder: Path, nbytes: int, *, suffix: str = "") -> None:
    """`read_over_fio`, `write_over_fio`, `cpu_per_gb_over_fio` and both `registered_gain`."""
    probe = probe_folder(folder)
    file = TrialFile(folder, nbytes, probe)
    with Memory(min(nbytes, _MEMORY_NBYTES), registered=True) as memory:
        ours = Mover(file, probe, memory, register=True)
        unregistered = Mover(file, probe, memory, register=False)
        found = report.rounds(f"large{suffix}", {
            "fio": lambda: {way: fio.run({way: _job(file, way)})[way] for way in _WAYS},
            "ours": ours.both,
            "unregistered": unregistered.both,
        })
        ours.close()
        unregistered.close()
    file.path.unlink()
    for way in _WAYS:
        report.figure(f"{way}{suffix}_over_fio", found.ratio("ours", "fio", way))
    costs = {
        # fio tells whole milliseconds, of some ten: only all rounds together are fine enough.
        variant: [sum(found.values(variant, way, cpu)) for way in _WAYS]
        for variant in ("ours", "fio")
    }
    for index, way in enumerate(_WAYS):
        report.figure(f"cpu_per_gb{suffix}_over_fio_{way}",
                      costs["ours"][index] / costs["fio"][index])
    report.figure(f"cpu_per_gb{suffix}_over_fio", sum(costs["ours"]) / sum(costs["fio"]))
    gains: dict[str, Value] = {"speed": speed, "cpu": cpu}
    for name, value in gains.items():
        ratios = [found.ratio("ours", "unregistered", way, value) for way in _WAYS]
        report.figure(f"registered_gain{suffix}_{name}", statistics.mean(ratios))


def _job(file: TrialFile, kind: str) -> Job:
    return Job(file.path, file.nbytes, kind, BLOCK_NBYTES, QUEUE_DEPTH,
               engine=FIO_ENGINES[file.probe.backend], direct=file.probe.direct)


FIO_ENGINES = {"uring": "io_uring", "aio": "libaio", "posix": "psync"}


def measure_first_write(report: Report, folder: Path, nbytes: int) -> None:
    """`first_write_over_rewrite`: into space that was just reserved, over the next write."""
    probe = probe_folder(folder)
    spec = TensorSpec(torch.uint8, (nbytes,), (1,))
    with Engine(backend=probe.backend) as engine, Memory(nbytes, registered=True) as memory:
        engine.register_memory(memory.tensor)

        def new_store() -> Samples:
            store = Store(folder, run="first-write", rank=0, world_size=1, engine=engine,
                          probe=probe, checksum=Checksum.OFF)
            samples = {}
            watch = Stopwatch()
            store.reserve("tensors.swp", nbytes)
            samples["reserve"] = watch.usage(nbytes)
            store.allocate_many("tensors.swp", {"all": spec})
            for name in ("first", "again"):
                watch = Stopwatch()
                store.write("all", memory.tensor, lane=Lane.WRITEBACK).wait()
                samples[name] = watch.usage(nbytes)
            store.close()
            return samples

        found = report.rounds("first write", {"ours": new_store})
    report.figure("first_write_over_rewrite", found.ratio_of(("ours", "first"), ("ours", "again")))
    report.figure("reserve_s_per_gb", 1 / found.median("ours", "reserve"))
