"""Every way on which bytes go between host and GPU, once, small: what gpu_sanitizer.py watches.

    gpu_copy_paths.py FOLDER DEVICE
    gpu_copy_paths.py - DEVICE        torch alone: a layer, forward and backward
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import nvmeswap.zero3
from nvmeswap import OffloadManager, TensorSwapper
from nvmeswap.config import AioConfig


def offload(folder: Path, device: str) -> None:
    for tier in ("cpu", "nvme"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        path = folder if tier == "nvme" else None
        with OffloadManager(model, device, tier=tier, path=path, trainable=tier):
            for _ in range(2):
                model(torch.ones(3, 256, device=device)).square().sum().backward()


def tensors(folder: Path, device: str, *, use_gds: bool = False) -> None:
    kept = {str(numel): torch.rand(numel, device=device) for numel in (1, 1001, 1 << 20, 5 << 20)}
    with TensorSwapper(folder, aio=AioConfig(use_gds=use_gds)) as swapper:
        swapper.swap_out_many(kept)
        back = swapper.swap_in_many(kept)
        swapper.swap_in("1001", out=back["1001"])
    assert all(torch.equal(back[name], tensor) for name, tensor in kept.items())


def tensors_by_gds(folder: Path, device: str) -> None:
    """Where cuFile does not work there is a warning, and it is `tensors` once more."""
    tensors(folder, device, use_gds=True)


def zero3(folder: Path, device: str) -> None:
    for update_device in dict.fromkeys(("cpu", device)):
        train(folder, device, update_device)


def train(folder: Path, device: str, update_device: str) -> None:
    place = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "sub_group_size": 65536, "offload_param": place,
                              "offload_optimizer": place},
        "nvmeswap": {"update_device": update_device},
    }
    model = nn.Sequential(nn.ModuleList(nn.Linear(256, 256) for _ in range(2)))
    model.forward = lambda x: model[0][1](model[0][0](x))  # type: ignore[method-assign]
    model, optimizer = nvmeswap.zero3.shard(model.to(device), config)
    for _ in range(2):
        model(torch.ones(3, 256, device=device)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def without_us(device: str) -> None:
    model = nn.Linear(256, 256, dtype=torch.bfloat16, device=device)
    rows = torch.ones(3, 256, dtype=torch.bfloat16, device=device)
    model(rows).float().square().sum().backward()


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[1] == "-":
        without_us(device)
        return
    for each in (offload, tensors, zero3, tensors_by_gds):
        each(folder, device)
        print(f"{each.__name__}: done", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print("all: done")


if __name__ == "__main__":
    main()
