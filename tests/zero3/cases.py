"""A model with everything awkward in it, and one training run of it, swapped or in RAM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

import nvmeswap.zero3
from tests.oracle import Run

VOCABULARY = 13
LEARNING_RATE = 1e-2


class Block(nn.Module):
    """Uneven shards, and a one-element parameter that leaves shards empty on most ranks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(gelu(self.up(self.norm(x))))


class AwkwardModel(nn.Module):
    """Parameters on the root, a frozen one, a block used twice, and a tied one."""

    def __init__(self, *, dim: int = 31, layers: int = 4, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.randn(dim), requires_grad=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.shift
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """One way to train it."""

    bf16: bool = False
    checkpointing: bool = False
    accumulation: int = 1
    params: str = "nvme"
    optimizer: str = "nvme"
    buffer_count: int = 3
    max_in_cpu: int = 0
    clip: bool = False
    steps: int = 4
    dim: int = 31
    device: str = "cpu"  # where it computes, and where the run in RAM updates
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, nvme_path: Path) -> dict[str, Any]:
        place = {"nvme_path": str(nvme_path), "buffer_count": self.buffer_count}
        return {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 5000,
                "offload_param": {**place, "device": self.params, "max_in_cpu": self.max_in_cpu},
                "offload_optimizer": {**place, "device": self.optimizer},
            },
            "bf16": {"enabled": self.bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "nvmeswap": {"min_swap_nbytes": 1000},
            **self.extra,
        }


def build(case: Case) -> AwkwardModel:
    torch.manual_seed(0)
    return AwkwardModel(dim=case.dim, checkpointing=case.checkpointing).to(case.device)


def run_swapped(case: Case, nvme_path: Path) -> Run:
    """Through nvmeswap."""
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(nvme_path))
    try:
        return train(model, optimizer, case)
    finally:
        optimizer.swap.close()


def shard_in_ram(model: nn.Module, *, bf16: bool, device: str = "cpu") -> None:
    """FSDP2, one group a block."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def run_in_ram(case: Case) -> Run:
    """FSDP2 and torch's AdamW: none of our parts."""
    model = build(case)
    shard_in_ram(model, bf16=case.bf16, device=case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return train(model, optimizer, case)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> Run:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    schedule = CosineAnnealingLR(optimizer, case.steps)
    numbers = []
    for _ in range(case.steps):
        for _ in range(case.accumulation):
            tokens = torch.randint(0, VOCABULARY, (4, 9), generator=generator).to(case.device)
            logits = model(tokens).float().flatten(0, 1)
            loss = cross_entropy(logits, tokens.flatten()) / case.accumulation
            loss.backward()
            numbers.append(loss.item())
        if case.clip:
            numbers.append(_clip(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():  # an evaluation between steps must see the new weights
            numbers.append(model(tokens).float().sum().item())
    weights = {
        name: value.full_tensor().cpu().clone() for name, value in model.state_dict().items()
    }
    return Run(numbers, weights)


def _clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    if hasattr(optimizer, "clip_grad_norm_"):
        return float(optimizer.clip_grad_norm_(0.5))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return float(norm.full_tensor())
