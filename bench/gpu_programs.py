"""Tests' training programs on GPUs: swapped, and with FSDP2's own offload to the CPU, where torch's
AdamW updates. (On one GPU tests/zero3/test_programs_on_cuda.py has them all.)"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from tests.oracle import Run, first_difference
from tests.zero3 import programs
from tests.zero3.loops import Accumulation, AccumulationWithoutSyncInBf16
from tests.zero3.programs import BF16, Program, Stack
from tests.zero3.structures import Adapted, FrozenBase, FrozenBaseInBf16


class Recomputed(nn.Module):
    """A block that is checkpointed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class InBf16(Program):
    policy = BF16


class Checkpointing(Program):
    def build(self) -> nn.Module:
        return Stack(block=lambda: Recomputed(programs.Block()))


class AllTogether(Accumulation):
    """LoRA, checkpointing, accumulation, bf16."""

    policy = BF16

    def build(self) -> nn.Module:
        return Stack(block=lambda: Recomputed(Adapted(torch.bfloat16)))


PROGRAMS: dict[str, type[Program]] = {
    "plain": Program, "bf16": InBf16, "checkpointing": Checkpointing,
    "accumulation": Accumulation, "accumulation_without_sync": AccumulationWithoutSyncInBf16,
    "lora": FrozenBase, "lora_bf16": FrozenBaseInBf16, "all_together": AllTogether,
}


@dataclass(frozen=True)
class Runs:
    """Of one program, on all ranks of the process group."""

    kind: type[Program]
    device: str

    def swapped(self, nvme_path: Path) -> Run:
        """With everything on NVMe, updated on the host."""
        return programs.run_swapped(self._program(), nvme_path, buffer_count=2)

    def offloaded(self) -> Run:
        program = self._program()
        if self.device == "cuda":
            program.offload = CPUOffloadPolicy()
        return programs.run_in_ram(program)

    def _program(self) -> Program:
        program = self.kind()
        program.device = self.device
        program.clips = False  # torch sums its norm on another device than ours
        return program


def begin(device: str) -> None:
    """A process group, torchrun's or of this process alone; the same bits at each run."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def difference(ours: Callable[[], Run], reference: Callable[[], Run]) -> str | None:
    """What differs first; or the error that one of them ended with."""
    try:
        return first_difference(ours(), reference())
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
