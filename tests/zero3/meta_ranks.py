"""Models built on the meta device: how tests make and run them, and what several ranks run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import nvmeswap.zero3
from nvmeswap import SwapError
from tests.oracle import Run, first_difference
from tests.zero3.cases import AwkwardModel, Block, Case, build, run_in_ram, train


def on_meta(case: Case) -> AwkwardModel:
    with torch.device("meta"):
        return AwkwardModel(dim=case.dim, checkpointing=case.checkpointing)


def initialise_as_built(case: Case) -> Callable[[nn.Module], None]:
    """Gives each module what the constructors give it; the seed is that of `build` then."""
    shift = build(case).shift.detach().clone()
    torch.manual_seed(0)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, AwkwardModel):
            module.shift.copy_(shift)
        elif isinstance(module, Block):
            module.scale.fill_(1.0)
        else:
            module.reset_parameters()  # type: ignore[operator]

    return initialise


def run_from_meta(case: Case, nvme_path: Path, **values: Any) -> Run:
    """As cases.run_swapped, of a model that never was in memory."""
    values = values or {"initialise": initialise_as_built(case)}
    model, optimizer = nvmeswap.zero3.shard(on_meta(case), case.config(nvme_path), **values)
    try:
        return train(model, optimizer, case)
    finally:
        if hasattr(optimizer, "swap"):
            optimizer.swap.close()


def save_in_two(model: nn.Module, folder: Path) -> None:
    """As a large model is saved: files by the thousand in life, here two, without tied copies."""
    tensors = dict(model.state_dict(keep_vars=True))
    kept = {id(tensor): name for name, tensor in reversed(tensors.items())}
    names = sorted(kept.values())
    for number, some in enumerate((names[::2], names[1::2])):
        part = {name: tensors[name].detach().contiguous() for name in some}
        save_file(part, folder / f"part{number}.safetensors")


def from_meta(nvme_path: Path) -> list[str]:
    """Drawn in fp32, and read in bf16; both equal RAM. Returns the names of errors."""
    folder = nvme_path.parent / "weights"
    folder.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        save_in_two(build(Case()), folder)
    dist.barrier()
    for bf16, values in ((False, {}), (True, {"weights": folder})):
        case = Case(bf16=bf16, steps=2)
        difference = first_difference(run_from_meta(case, nvme_path, **values), run_in_ram(case))
        assert difference is None, f"{case}, {values}: {difference}"
    _columns(nvme_path, nvme_path.parent / "columns.safetensors")
    return _errors(nvme_path, folder)


def _columns(nvme_path: Path, path: Path) -> None:
    """A rank's part is not one piece of the file."""
    torch.manual_seed(0)
    expected = nn.Linear(64, 40, bias=False)
    if dist.get_rank() == 0:
        save_file(expected.state_dict(), path)
    dist.barrier()
    for values in ({}, {"weights": path}):
        torch.manual_seed(0)
        model = fully_shard(
            nn.Linear(64, 40, bias=False, device="meta"),
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            shard_placement_fn=lambda parameter: Shard(1),
        )
        model, optimizer = nvmeswap.zero3.shard(model, Case().config(nvme_path), **values)
        assert torch.equal(model.weight.full_tensor(), expected.weight)
        optimizer.close()


def _errors(nvme_path: Path, folder: Path) -> list[str]:
    """Of seeds that differ, and of weights that only rank 0 has."""
    raised = []
    torch.manual_seed(dist.get_rank())
    weights = folder if dist.get_rank() == 0 else folder / "nowhere"
    for device in ("nvme", "none"):
        case = Case(params=device, optimizer=device)
        for values in ({"initialise": lambda module: None}, {"weights": weights}):
            try:
                nvmeswap.zero3.shard(on_meta(case), case.config(nvme_path), **values)
            except SwapError as error:
                raised.append(type(error).__name__)
    return raised
