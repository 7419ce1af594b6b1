"""One large file: speed and processor time beside fio, and what registering memory brings."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

from fio import Fio, Job
from report import Report, Samples, cpu

from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.io.engine import Engine, Lane
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.io.request import Request
from nvmeswap.store.store import Checksum, Store, TensorSpec

_BLOCK_NBYTES = 512 << 10
_QUEUE_DEPTH = 32


class Mover:
    """An engine over an existing file, and an arena whose halves take turns."""

    def __init__(
        self, file: TrialFile, probe: FolderProbe, memory: Memory, *, register: bool
    ) -> None:
        self._nbytes = file.nbytes
        self._halves = memory.tensor.split(memory.tensor.numel() // 2)
        self._engine = Engine(backend=probe.backend, block_nbytes=_BLOCK_NBYTES,
                              queue_depth=_QUEUE_DEPTH)
        if register:
            self._engine.register_memory(memory.tensor)
        self._file = self._engine.open(
            file.path, offset_alignment_nbytes=probe.offset_alignment_nbytes,
            memory_alignment_nbytes=probe.memory_alignment_nbytes,
        )

    def both(self) -> Samples:
        """All of the file, once each way."""
        return {"read": self._move(self._engine.read), "write": self._move(self._engine.write)}

    def _move(self, start: StartTransfer) -> Usage:
        under_way: deque[Request] = deque()
        step_nbytes = self._halves[0].numel()
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
    """read, write, cpu_per_gb over fio; registered_gain. `nbytes`: of the file."""
    probe = probe_folder(folder)
    file = TrialFile(folder, nbytes, probe)
    with Memory(min(nbytes, 1 << 30), registered=True) as memory:
        ours = Mover(file, probe, memory, register=True)
        unregistered = Mover(file, probe, memory, register=False)

        def fio_both() -> Samples:
            return {
                **fio.run({"read": _job(file, "read", probe)}),
                **fio.run({"write": _job(file, "write", probe)}),
            }

        found = report.rounds(f"large{suffix}", {
            "fio": fio_both, "ours": ours.both, "unregistered": unregistered.both,
        })
        ours.close()
        unregistered.close()
    file.path.unlink()
    for way in ("read", "write"):
        report.figure(f"{way}{suffix}_over_fio", found.ratio("ours", "fio", way))
    for way in ("read", "write"):
        # fio tells whole milliseconds of some ten: only the sum of all rounds is fine enough.
        mine, others = (sum(found.values(variant, way, cpu)) for variant in ("ours", "fio"))
        report.figure(f"cpu_per_gb{suffix}_over_fio_{way}", mine / others)
    if suffix:
        return
    for name, value in (("speed", None), ("cpu", cpu)):
        ratios = [
            found.ratio("ours", "unregistered", way, *([value] if value else []))
            for way in ("read", "write")
        ]
        report.figure(f"registered_gain_{name}", statistics.mean(ratios))


def _job(file: TrialFile, kind: str, probe: FolderProbe) -> Job:
    engine = {"uring": "io_uring", "aio": "libaio", "posix": "psync"}[probe.backend]
    return Job(file.path, file.nbytes, kind, _BLOCK_NBYTES, _QUEUE_DEPTH, engine,
               direct=probe.direct)


def measure_first_write(report: Report, folder: Path, nbytes: int) -> None:
    """The first write of a new swap file over the next one."""
    probe = probe_folder(folder)
    spec = TensorSpec("uint8", (nbytes,), (1,))
