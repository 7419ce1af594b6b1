"""Step `copies`: between the GPU and our arena, beside torch's own page-locked memory."""

from __future__ import annotations

import time

import torch
from gpu_told import Options, compare, detail, note, options, rounds
from report import Samples

from nvmeswap.cli.bench.usage import Usage
from nvmeswap.memory.arena import Arena

_TARGET = 0.95


class Copies:
    """Both ways between host memory and a tensor on the device."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device

    def run(self) -> Samples:
        return {"to_device": self._copy(self._device, self._host),
                "to_host": self._copy(self._host, self._device)}

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Usage:
        _finish(self._device)
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _finish(self._device)
        return Usage(source.nbytes, time.perf_counter() - began_s, 0.0)


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def main(given: Options) -> None:
    nbytes = given.size(2 << 30, 16 << 20)
    arena = Arena(nbytes)
    detail("arena_lock_mode", arena.lock_mode.name)
    on_gpu = given.device == "cuda"
    if not on_gpu:
        note("no GPU: copies within host memory")
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    device = torch.ones(nbytes, dtype=torch.uint8, device=given.device)
    variants = {"arena": Copies(arena.memory, device), "torch_pinned": Copies(pinned, device)}
    for each in variants.values():
        each.run()
    found = rounds({name: each.run for name, each in variants.items()}, given.left_s / 2,
                   least=5, most=15)
    for way in ("to_device", "to_host"):
        compare("copies", found, "arena", "torch_pinned", way, target=_TARGET)
    arena.close()


if __name__ == "__main__":
    main(options(__doc__))
