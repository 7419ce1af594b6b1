"""Step `bounce`: tensors on the GPU to NVMe and back, beside the drive alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from gpu_raw import RawFile
from gpu_told import Options, compare, figure, options, rounds
from report import Samples

from nvmeswap import TensorSwapper
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.config import AioConfig

_TARGET = 0.95
_SMALL_NBYTES = 64 << 10
_POISON = -1.0


class SwappedTensors:
    """Through TensorSwapper, each to where it was before."""

    def __init__(
        self, folder: Path, tensors: dict[str, torch.Tensor], aio: AioConfig | None = None
    ) -> None:
        folder.mkdir()
        self.swapper = TensorSwapper(folder, aio=aio)
        self._tensors = tensors
        self._back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self._nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.run()  # finds its places, and writes them for the first time

    def run(self) -> Samples:
        return {"write": self._timed(self._write), "read": self._timed(self._read)}

    def _write(self) -> None:
        if len(self._tensors) == 1:
            self.swapper.swap_out(*next(iter(self._tensors.items())))
        else:
            self.swapper.swap_out_many(self._tensors)

    def _read(self) -> None:
        if len(self._back) == 1:
            self.swapper.swap_in(*next(iter(self._back.items())))
        else:
            self.swapper.swap_in_many(self._back, out=self._back)

    def _timed(self, move: Callable[[], None]) -> Usage:
        finish()
        watch = Stopwatch()
        move()
        finish()
        return watch.usage(self._nbytes)

    def is_right(self) -> bool:
        """What is read over poison equals what was written."""
        for tensor in self._back.values():
            tensor.fill_(_POISON)
        self._read()
        finish()
        return all(torch.equal(self._back[name], each) for name, each in self._tensors.items())

    def close(self) -> None:
        self.swapper.close()


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def drawn(count: int, nbytes: int, device: str) -> dict[str, torch.Tensor]:
    """Each in memory of its own."""
    generator = torch.Generator(device).manual_seed(0)
    return {str(number): torch.rand(nbytes // 4, generator=generator, device=device)
            for number in range(count)}


def measure_whole(given: Options) -> None:
    nbytes = given.size(4 << 30, 32 << 20)
    tensors = drawn(1, nbytes, given.device)
    swapped = SwappedTensors(given.folder / "whole", tensors)
    raw = RawFile(given.folder / "whole_raw", nbytes)
    found = rounds({"swapper": swapped.run, "raw": raw.run}, 0.55 * given.seconds, most=7)
    for way in ("write", "read"):
        compare("bounce", found, "swapper", "raw", way, target=_TARGET)
    figure("bounce_is_right", float(swapped.is_right()), target=1.0)
    swapped.close()
    raw.close()


def measure_small(given: Options) -> None:
    """The same number of tensors from the CPU and as many bytes raw, in the same rounds."""
    count = given.size(8192, 256)
    tensors = drawn(count, _SMALL_NBYTES, given.device)
    swapped = SwappedTensors(given.folder / "small", tensors)
    on_cpu = SwappedTensors(given.folder / "small_cpu", drawn(count, _SMALL_NBYTES, "cpu"))
    raw = RawFile(given.folder / "small_raw", count * _SMALL_NBYTES)
    found = rounds({"swapper": swapped.run, "cpu_tensors": on_cpu.run, "raw": raw.run},
                   max(6.0, min(0.2 * given.seconds, given.left_s - 8)))
    for way in ("write", "read"):
        for over in ("cpu_tensors", "raw"):
            compare("bounce_64k", found, "swapper", over, way, target=_TARGET)
    figure("bounce_64k_is_right", float(swapped.is_right()), target=1.0)
    for each in (swapped, on_cpu, raw):
        each.close()


def main(given: Options) -> None:
    measure_whole(given)
    measure_small(given)


if __name__ == "__main__":
    main(options(__doc__))
