"""Step `gds`: the same through cuFile, beside torch.cuda.gds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_bounce import SwappedTensors, drawn, finish
from gpu_raw import RawFile
from gpu_told import Options, compare, detail, figure, note, options, rounds, skip
from report import Samples

from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.config import AioConfig
from nvmeswap.io.gds import probe_gds

_TARGET = 0.95


class GdsTensors:
    """Storages through torch's wrapper of cuFile, one after the other, in one file."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._file = torch.cuda.gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
        self._sources = [tensor.untyped_storage() for tensor in tensors.values()]
        self._kept = [torch.empty_like(tensor) for tensor in tensors.values()]
        self._targets = [tensor.untyped_storage() for tensor in self._kept]
        self._nbytes = sum(storage.nbytes() for storage in self._sources)
        self.run()

    def run(self) -> Samples:
        return {"write": self._timed(self._file.save_storage, self._sources),
                "read": self._timed(self._file.load_storage, self._targets)}

    def _timed(self, move: Callable[..., Any], storages: list[torch.UntypedStorage]) -> Usage:
        finish()
        watch = Stopwatch()
        offset = 0
        for storage in storages:
            move(storage, offset)
            offset += storage.nbytes()
        finish()
        return watch.usage(self._nbytes)

    def is_right(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(map(torch.equal, self._kept, tensors.values()))


def settings(folder: Path) -> AioConfig:
    """With GDS, if it works in the folder; else the step is skipped."""
    probe = probe_gds(folder)
    detail("probe", {"mode": str(probe.mode), "reason": probe.reason})
    if probe.mode is None:
        skip(f"no GDS: {probe.reason}")
    return AioConfig(use_gds=True)


def measure(given: Options, aio: AioConfig, name: str, count: int, nbytes: int) -> None:
    tensors = drawn(count, nbytes, given.device)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        swapped = SwappedTensors(given.folder / name, tensors, aio)
    for warning in warned:
        note(f"{name}: {warning.message}")
    raw = RawFile(given.folder / f"{name}_raw", count * nbytes)
    variants: dict[str, Callable[[], Samples]] = {"swapper": swapped.run, "raw": raw.run}
    try:
        theirs = GdsTensors(given.folder / f"{name}_gds", tensors)
        variants["torch_gds"] = theirs.run
    except RuntimeError as error:
        note(f"{name}: torch.cuda.gds refuses: {error}")
    found = rounds(variants, max(6.0, min(0.5 * given.seconds, given.left_s - 8)), most=5)
    for way in ("write", "read"):
        if "torch_gds" in variants:
            compare(name, found, "swapper", "torch_gds", way, target=_TARGET)
        compare(name, found, "swapper", "raw", way, target=None)
    figure(f"{name}_is_right", float(swapped.is_right()), target=1.0)
    if "torch_gds" in variants and not theirs.is_right(tensors):
        note(f"{name}: what torch.cuda.gds read differs from what it wrote")
    _tell_how(name, swapped)
    swapped.close()
    raw.close()


def _tell_how(name: str, swapped: SwappedTensors) -> None:
    """Through cuFile, or through page-locked blocks after all."""
    engine = swapped.swapper._space.engine
    assert engine is not None
    if engine.gds_refusal is not None:
        note(f"{name}: cuFile was given up: {engine.gds_refusal}")
    stats = engine.stats()
    moved_nbytes = stats.gpudirect_nbytes + stats.device_bounced_nbytes
    figure(f"{name}_share_by_cufile", stats.gpudirect_nbytes / max(1, moved_nbytes), target=1.0)


def main(given: Options) -> None:
    aio = settings(given.folder)
    if given.rehearses:
        skip("torch.cuda.gds needs a GPU")
    # Pieces of 1 GiB: whether one call of cuFile takes more is not what is asked here.
    measure(given, aio, "gds", 2, 1 << 30)
    measure(given, aio, "gds_64k", 2048, 64 << 10)


if __name__ == "__main__":
    main(options(__doc__))
