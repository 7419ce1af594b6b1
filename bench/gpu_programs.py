"""Tests' training programs on a GPU: swapped, and in RAM in two ways.

`offloaded`: FSDP2's own offload to the CPU, where torch's AdamW updates; `resident`: everything on
the GPU. Which of them a swapped run equals bit for bit depends on where it updates.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import nvmeswap.zero3
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

    def swapped(self, nvme_path: Path, **block: Any) -> Run:
        """With everything on NVMe; `block` are settings of "nvmeswap"."""
        program = self._program(offloads=False)
        model, mesh = programs.sharded(program)
        config = programs.config(program, nvme_path)
        config["nvmeswap"].update(block)
        model, optimizer = nvmeswap.zero3.shard(model, config, mesh)
        try:
            return _on_cpu(programs._train(program, model, optimizer))
        finally:
            optimizer.close()

    def offloaded(self) -> Run:
        return _on_cpu(programs.run_in_ram(self._program(offloads=self.device == "cuda")))

    def resident(self) -> Run:
        return _on_cpu(programs.run_in_ram(self._program(offloads=False)))

    def _program(self, *, offloads: bool) -> Program:
        device = self.device

        class Placed(self.kind):  # type: ignore[name-defined,misc]
            clips = False  # torch sums its norm on another device than ours

            def mesh(self) -> DeviceMesh:
                return init_device_mesh(device, (dist.get_world_size(),))

            def fully_shard(self, module: Any, mesh: DeviceMesh, **options: Any) -> None:
                if offloads:
                    options["offload_policy"] = CPUOffloadPolicy()
                super().fully_shard(module, mesh, **options)

        return Placed()


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


def _on_cpu(run: Run) -> Run:
    return Run(run.losses, {name: each.cpu() for name, each in run.weights.items()})
