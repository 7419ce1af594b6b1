"""Proof that two runs are one: every loss and every weight compared bit by bit, on all ranks.

The first run's weights wait in a temporary file, not in RAM: a model that needs swapping would not
fit there twice. Both sides are read one parameter at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter, whole and on the CPU. All ranks must walk through all of it."""
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        # On one rank the full tensor is the shard itself: the clone is what reads a swapped one.
        yield name, full.detach().clone().cpu().contiguous()


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.flatten().view(torch.uint8).numpy()


def write_weights(model: nn.Module, folder: Path | None) -> IO[bytes]:
    """The model's weights in an unnamed file in `folder`, to be closed; on rank 0, empty on others.
    """
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # the caller closes it
    for _, weight in full_weights(model):
        if dist.get_rank() == 0:
            file.write(bytes_of(weight).data)
    file.seek(0)
    return file


def first_weight_difference(model: nn.Module, file: IO[bytes]) -> str | None:
    """Where the model's weights first differ from those that `write_weights` left in `file`."""
    difference: str | None = None
    for name, weight in full_weights(model):
        if dist.get_rank() == 0 and difference is None:
            stored = np.frombuffer(file.read(weight.nbytes), dtype=np.uint8)
            difference = _compare_weight(name, weight, stored)
    return difference


def _compare_weight(name: str, weight: Tensor, stored: npt.NDArray[np.uint8]) -> str | None:
    if stored.nbytes != weight.nbytes:
        return f"weight {name}: {stored.nbytes} bytes, in RAM {weight.nbytes}"
    unequal = np.flatnonzero(stored != bytes_of(weight))
    if not unequal.size:
        return None
    element = int(unequal[0]) // weight.element_size()
    swapped = torch.from_numpy(stored.copy()).view(weight.dtype)[element].item()
    in_ram = weight.flatten()[element].item()
    return f"weight {name}, element {element}: {swapped!r}, in RAM {in_ram!r}"


def first_loss_difference(swapped: Sequence[float], in_ram: Sequence[float]) -> str | None:
    """The first step whose losses differ in any bit."""
    for step, (ours, theirs) in enumerate(zip(swapped, in_ram, strict=True), start=1):
        if ours.hex() != theirs.hex():
            return f"loss of step {step}: {ours!r}, in RAM {theirs!r}"
    return None


def agree(difference: str | None) -> str | None:
    """What the first rank that saw a difference saw; every rank gets the same answer."""
    seen: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, difference)
    for rank, what in enumerate(seen):
        if what is not None:
            return what if len(seen) == 1 else f"rank {rank}: {what}"
    return None
