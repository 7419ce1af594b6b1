"""One way to run a model that is not on its device, as vs_offload_peers.py asks for it.

    {"system": "ours_nvme", "device": "cuda", "folder": "...", "size": {...}}   builds it
    {"expected": "FILE"}   compares the last output with the file's (`resident` writes it)
    {}                     two forwards, each with none of the folder's files in the page cache, and
                           what the second took: forwards follow each other when one samples or
                           decodes, and memory that was free for seconds is slow to get on some
                           virtual machines
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answers import Taken, answer_requests, forget_peak, memory_nbytes
from offload_model import Size, Stack, make_input, make_model
from page_cache import cached_nbytes, drop_cached
from torch import nn

Apply = Callable[[nn.Module, str, Path], Any]
"""Takes a model in RAM, its device and an empty folder; what it returns is kept."""


def import_nothing() -> Apply:
    return lambda model, device, _: model.to(device)


def import_ours(tier: str) -> Apply:
    from nvmeswap import OffloadManager

    def apply(model: nn.Module, device: str, folder: Path) -> Any:
        path = folder if tier == "nvme" else None
        return OffloadManager(model, device, tier=tier, path=path, granularity="leaf")

    return apply


def import_diffusers(*, disk: bool, **options: Any) -> Apply:
    from diffusers.hooks import apply_group_offloading

    def apply(model: nn.Module, device: str, folder: Path) -> Any:
        apply_group_offloading(
            model, onload_device=torch.device(device), offload_device=torch.device("cpu"),
            offload_type="block_level", num_blocks_per_group=1,
            offload_to_disk_path=str(folder) if disk else None, **options,
        )

    return apply


def import_accelerate(*, disk: bool) -> Apply:
    from accelerate import cpu_offload, disk_offload

    def apply(model: nn.Module, device: str, folder: Path) -> Any:
        if disk:
            return disk_offload(model, str(folder), execution_device=torch.device(device))
        return cpu_offload(model, execution_device=torch.device(device))

    return apply


IMPORTS: dict[str, Callable[[], Apply]] = {
    "resident": import_nothing,
    "ours_cpu": partial(import_ours, "cpu"),
    "diffusers_cpu": partial(import_diffusers, disk=False),
    "diffusers_cpu_stream": partial(import_diffusers, disk=False, use_stream=True),
    "accelerate_cpu": partial(import_accelerate, disk=False),
    "ours_nvme": partial(import_ours, "nvme"),
    "diffusers_disk": partial(import_diffusers, disk=True),
    "diffusers_disk_stream": partial(import_diffusers, disk=True, use_stream=True),
    "diffusers_disk_record": partial(
        import_diffusers, disk=True, use_stream=True, record_stream=True),
    "accelerate_disk": partial(import_accelerate, disk=True),
}
PINNED = "pinned_copy"
"""Copies as many bytes from page-locked memory, a block at a time: what no tier in RAM beats."""


class Offloaded:
    """A model whose weights are elsewhere, and what its forwards take."""

    def __init__(self, system: str, device: str, folder: Path, size: Size) -> None:
        apply = IMPORTS[system]()
        self._device, self._folder, self._writes = device, folder, system == "resident"
        self._x = make_input(size, device)
        nn.functional.linear(self._x[:8], torch.zeros_like(self._x[:8]))  # threads, cuBLAS
        self._held_nbytes = memory_nbytes()["resident_nbytes"]
        self._model: Stack = make_model(size)
        self._kept = apply(self._model, device, folder)
        gc.collect()
        self._y = torch.empty(0)

    def forward(self) -> dict[str, Any]:
        self._once()
        return self._once()

    def _once(self) -> dict[str, Any]:
        drop_cached(self._folder)
        left_nbytes = cached_nbytes(self._folder)
        self._y = torch.empty(0)
        forget_peak()
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        taken = Taken()
        with torch.no_grad():
            y = self._model(self._x)
        if self._device == "cuda":
            torch.cuda.synchronize()
        found = taken.so_far()
        host_nbytes = memory_nbytes()["peak_nbytes"] - self._held_nbytes
        self._y = y.cpu()
        return {
            **found, "left_nbytes": left_nbytes, "cached_nbytes": cached_nbytes(self._folder),
            "host_peak_nbytes": host_nbytes,
            "peak_nbytes": (torch.cuda.max_memory_allocated() if self._device == "cuda"
                            else host_nbytes),
        }

    def compare(self, expected: str) -> dict[str, float]:
        """The largest difference of any element of the last output."""
        if self._writes:
            torch.save(self._y, expected)
        other = torch.load(expected)
        return {"difference": (self._y.double() - other.double()).abs().max().item(),
                "is_finite": float(self._y.isfinite().all())}


class PinnedCopy:
    """Blocks from page-locked memory to the device, and nothing else."""

    def __init__(self, size: Size) -> None:
        self._host = torch.empty(size.blocks, size.block_nbytes, dtype=torch.uint8,
                                 pin_memory=True)
        self._device = torch.empty(2, size.block_nbytes, dtype=torch.uint8, device="cuda")

    def forward(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        taken = Taken()
        for number, block in enumerate(self._host):
            self._device[number % 2].copy_(block, non_blocking=True)
        torch.cuda.synchronize()
        return taken.so_far()


def begin() -> Callable[..., dict[str, Any]]:
    system: Offloaded | PinnedCopy | None = None

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal system
        if "system" in request:
            size = Size(**request["size"])
            if request["system"] == PINNED:
                system = PinnedCopy(size)
            else:
                system = Offloaded(request["system"], request["device"], Path(request["folder"]),
                                   size)
            return {}
        if "expected" in request:
            assert isinstance(system, Offloaded)
            return system.compare(request["expected"])
        assert system is not None
        return system.forward()

    return answer


if __name__ == "__main__":
    answer_requests(begin)
