"""What no optimizer step can beat here: its arithmetic alone, and fio moving its bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from fio import Fio, Job
from large import BLOCK_NBYTES, FIO_ENGINES, QUEUE_DEPTH
from report import Samples

from nvmeswap.cli.bench.trial import TrialFile
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.swap.swapped import SwappedOptimizer

_ROUND_NUMEL = 32 << 20  # 320 MiB of state: far beyond any cache


class UpdateAlone:
    """Our update with all state in RAM, of as many elements as the step has: a smaller parameter
    that is stepped again and again, but too large for any of it to be in a cache when it is met."""

    def __init__(self, numel: int, folder: Path) -> None:
        self._numel = numel
        self._round_numel = min(numel, _ROUND_NUMEL)
        parameter = torch.nn.Parameter(torch.zeros(self._round_numel, dtype=torch.bfloat16))
        parameter.grad = torch.empty_like(parameter).uniform_(-1e-3, 1e-3)
        self._optimizer = SwappedOptimizer(
            torch.optim.AdamW, [parameter], lr=1e-4, nvme_path=folder, ratio=0.0
        )
        self._optimizer.step()  # makes the moments

    def run(self) -> Usage:
        """Nothing is moved; the time of the last, incomplete round is taken in proportion."""
        count = -(-self._numel // self._round_numel)
        watch = Stopwatch()
        for _ in range(count):
            self._optimizer.step()
        taken = watch.usage(0)
        share = self._numel / (count * self._round_numel)
        return Usage(0, taken.wall_s * share, taken.cpu_s * share)

    def close(self) -> None:
        self._optimizer.close()


class BytesAlone:
    """fio over two files, reading one of `read_nbytes` and writing the other."""

    def __init__(self, fio: Fio, folder: Path, *, read_nbytes: int, write_nbytes: int) -> None:
        self._fio = fio
        probe = probe_folder(folder)
        self._jobs = {
            way: _job(folder / way, way, nbytes, probe)
            for way, nbytes in (("read", read_nbytes), ("write", write_nbytes))
            if nbytes >= BLOCK_NBYTES
        }

    def run(self) -> dict[str, Usage]:
        """`at_once` and `in_turn`: the time until both are done."""
        together = self._fio.run(self._jobs, at_once=True).values()
        in_turn = self._fio.run(self._jobs).values()
        nbytes = sum(usage.nbytes for usage in together)
        return {
            "at_once": Usage(nbytes, max((usage.wall_s for usage in together), default=0.0),
                             sum(usage.cpu_s for usage in together)),
            "in_turn": Usage(nbytes, sum(usage.wall_s for usage in in_turn),
                             sum(usage.cpu_s for usage in in_turn)),
        }


class Floor:
    """Both, one after the other, as one variant of a round. Without fio the update only."""

    def __init__(self, update: UpdateAlone, bytes_alone: BytesAlone | None) -> None:
        self._update = update
        self._bytes = bytes_alone

    def run(self) -> Samples:
        return {"update": self._update.run(), **(self._bytes.run() if self._bytes else {})}


def floor_s(update_s: float, at_once_s: float, in_turn_s: float) -> float:
    """The larger of arithmetic and bytes, the latter in the better of two ways."""
    return max(update_s, min(at_once_s, in_turn_s))


def _job(folder: Path, way: str, nbytes: int, probe: FolderProbe) -> Job:
    folder.mkdir()
    nbytes = nbytes // BLOCK_NBYTES * BLOCK_NBYTES
    file = TrialFile(folder, nbytes, probe)
    return Job(file.path, nbytes, way, BLOCK_NBYTES, QUEUE_DEPTH,
               engine=FIO_ENGINES[probe.backend], direct=probe.direct)
