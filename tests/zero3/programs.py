"""One program, run twice: with resident shards under torch's AdamW, and swapped.

A `Program` is a model, its FSDP2 calls and a loop. Both runs execute the same lines of it, so what
differs between them is ours. The programs are in `structures.py` (models) and `loops.py` (loops).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.functional import gelu

import nvmeswap.zero3
from nvmeswap.zero3 import SwapStats
from tests.oracle import Run

DIM = 24
LEARNING_RATE = 1e-2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two layers, the second with an uneven first dimension."""

    def __init__(self, dim: int = DIM, hidden: int = 2 * DIM + 1) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks, one after the other, and a head on the root."""

    def __init__(self, layers: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Dice:
    """Where a program gets its random numbers: `own` ones, or those that all ranks draw."""

    own: torch.Generator = field(default_factory=torch.Generator)
    shared: torch.Generator = field(default_factory=torch.Generator)
    device: str = "cpu"

    def batch(self, *shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (4, DIM)), generator=self.own).to(self.device)

    def tokens(self, vocabulary: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, shape, generator=self.own).to(self.device)

    def choice(self, count: int, *, among: int) -> list[int]:
        """`count` different numbers below `among`, the same on all ranks."""
        return torch.randperm(among, generator=self.shared)[:count].tolist()


class Program:
    """Subclasses say what is special about them, and are known by their names. `device`: where it
    computes; `offload`: where FSDP2 has the parameters of the run in RAM; `update_device`: where
    the swapped run updates."""

    known: ClassVar[dict[str, type[Program]]] = {}

    device = "cpu"
    update_device = "cpu"
    offload = OffloadPolicy()

    steps = 3
    clips = True
    policy = MixedPrecisionPolicy()
    mesh_shape: tuple[int, ...] | None = None
    min_swap_nbytes = 0
    needs: str | None = None  # a method of FSDPModule that is in newer torch only

    def __init_subclass__(cls) -> None:
        Program.known[cls.__name__] = cls

    @classmethod
    def runs_on(cls, ranks: int) -> bool:
        """On this torch and so many ranks."""
        fits = cls.mesh_shape is None or math.prod(cls.mesh_shape) == ranks
        return fits and (cls.needs is None or hasattr(FSDPModule, cls.needs))

    def build(self) -> nn.Module:
        return Stack()

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """The fully_shard calls."""
        for module in [*model.blocks, model]:
            self.fully_shard(module, mesh)

    def fully_shard(self, module: Any, mesh: DeviceMesh, **options: Any) -> None:
        fully_shard(
            module, mesh=mesh, mp_policy=self.policy, offload_policy=self.offload, **options
        )

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        return model(dice.batch()).float().square().mean()

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        """One step of training; the numbers that both runs must agree on."""
        loss = self.loss(model, dice)
        loss.backward()
        return [loss.item(), *self.update(model, optimizer)]

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        """Clip, step, forget."""
        numbers = [clip(model, optimizer)] if self.clips else []
        optimizer.step()
        optimizer.zero_grad()
        return numbers

    def resident_optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        """After each step of the swapped run: what must hold."""

    def mesh(self) -> DeviceMesh:
        shape = self.mesh_shape or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        return init_device_mesh(self.device, shape, mesh_dim_names=names)


def clip(model: nn.Module, optimizer: Any, norm: float = 0.1) -> float:
    if hasattr(optimizer, "clip_grad_norm_"):
        return float(optimizer.clip_grad_norm_(norm))
    total = nn.utils.clip_grad_norm_(model.parameters(), norm)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def sharded(program: Program) -> tuple[nn.Module, DeviceMesh]:
    torch.manual_seed(0)
    model, mesh = program.build().to(program.device), program.mesh()
    program.group(model, mesh)
    return model, mesh


def run_in_ram(program: Program) -> Run:
    """FSDP2 and torch's AdamW: none of our parts."""
    model, _ = sharded(program)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _train(program, model, program.resident_optimizer(trained))


def run_swapped(program: Program, nvme_path: Path, buffer_count: int) -> Run:
    """Through nvmeswap, with everything on NVMe."""
    model, mesh = sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, config(program, nvme_path, buffer_count), mesh)
    try:
        run = _train(program, model, optimizer)
        check_slots(optimizer.swap.stats())
        return run
    finally:
        optimizer.close()


def config(program: Program, nvme_path: Path, buffer_count: int = 2) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(nvme_path), "buffer_count": buffer_count}
    return {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 5000,
            "offload_param": place,
            "offload_optimizer": place,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "nvmeswap": {
            "min_swap_nbytes": program.min_swap_nbytes,
            "update_device": program.update_device,
        },
    }


def check_slots(stats: SwapStats) -> None:
    """Every slot is free, or held by a shard that knows of it."""
    pool = stats.pools.get("parameters")
    if pool is None:  # all shards of this rank are empty
        assert stats.params.nvme_nbytes == 0
        return
    assert pool.in_use_count == stats.params.held_slot_count
    assert pool.free_count + pool.in_use_count == pool.slot_count


def _train(program: Program, model: nn.Module, optimizer: Any) -> Run:
    dice = Dice(device=program.device)
    dice.own.manual_seed(1 + dist.get_rank())
    numbers = []
    for _ in range(program.steps):
        numbers += program.step(model, optimizer, dice)
        if hasattr(optimizer, "swap"):
            program.watch(model, optimizer)
    weights = {name: _whole(value) for name, value in model.state_dict().items()}
    return Run(numbers, weights)


def _whole(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.to("cpu", copy=True)
