"""State files whole, as tests make and compare them."""

from __future__ import annotations

from pathlib import Path

import torch

from nvmeswap.swap.state_file import StateFileWriter, TensorShape

MiB = 1 << 20
OLDER = {"older": torch.arange(5)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.shape == right[name].shape
        assert raw(tensor) == raw(right[name]), name


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorShape]:
    return {name: TensorShape(each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with StateFileWriter(path, shapes_of(tensors)) as file:
        for name, tensor in tensors.items():
            file.write(name, 0, tensor)
