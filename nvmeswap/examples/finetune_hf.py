"""Fine-tune a transformers model from NVMe, whole or by LoRA, and prove that it equals RAM.

    python -m nvmeswap.examples.finetune_hf --path /mnt/nvme --check
    python -m nvmeswap.examples.finetune_hf --path /mnt/nvme --model FOLDER --lora --check
    torchrun --nproc-per-node 2 -m nvmeswap.examples.finetune_hf --path /mnt/nvme --check

Needs `pip install nvmeswap[examples]`. The loop (`train`) is plain PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import nvmeswap.zero3
from nvmeswap.errors import SwapError
from nvmeswap.examples.check import (
    agree,
    first_loss_difference,
    first_weight_difference,
    write_weights,
)
from nvmeswap.examples.hf_arguments import add_arguments, conflict
from nvmeswap.examples.hf_model import (
    blocks_of,
    build_model,
    load_text,
    sketch_model,
    weights_of,
)
from nvmeswap.examples.launch import leave, ranks
from nvmeswap.examples.loop import Clock, Step
from nvmeswap.examples.reference import shard_in_ram
from nvmeswap.examples.report import Figures, Result, StepReporter, Traffic
from nvmeswap.examples.text import Text
from nvmeswap.zero3.optimizer import ShardedOptimizer

WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked. Counts are per rank."""

    path: Path
    model: Path | None
    lora: bool
    text: Path | None
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    seed: int
    precision: str
    gradient_checkpointing: bool
    device: str
    check: bool
    json: Path | None

    def build_model(self) -> nn.Module:
        """The same weights on every rank and in every run."""
        return build_model(
            self.model,
            lora=self.lora,
            bf16=self.precision == "bf16",
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )


def swap_config(options: Options) -> dict[str, Any]:
    """The DeepSpeed JSON of this run."""
    nvme = {"device": "nvme", "nvme_path": str(options.path.absolute())}
    return {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "bf16": {"enabled": options.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.learning_rate, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "max_in_cpu": 0},
            "offload_optimizer": nvme,
        },
    }


def train(model: nn.Module, optimizer: Optimizer, text: Text, options: Options) -> Iterator[Step]:
    """Train, yielding each step when it is complete."""
    rank = dist.get_rank()
    torch.manual_seed(options.seed + rank)  # for dropout, if the model has any
    for index in range(options.steps):
        clock = Clock(options.device)
        tokens, _ = text.batch(
            options.batch_size,
            options.sequence_length,
            seed=options.seed,
            step=index,
            micro_batch=0,
            rank=rank,
        )
        tokens = tokens.to(options.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward_s = clock.lap_s()
        loss.backward()
        backward_s = clock.lap_s()
        optimizer.step()
        optimizer.zero_grad()
        yield Step(index, loss.item(), forward_s, backward_s, clock.lap_s())


def shard(options: Options, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    """A folder's weights go from its files to NVMe, never as a whole into memory. (Adapters rename
    the modules that the files name, so their base is built in memory, as are random weights.)"""
    config = swap_config(options)
    weights = weights_of(options.model)
    if weights is None or options.lora:
        plain = options.build_model().to(options.device)
        return nvmeswap.zero3.shard(plain, config, mesh=mesh)
    sketch = sketch_model(weights, gradient_checkpointing=options.gradient_checkpointing)
    return nvmeswap.zero3.shard(sketch, config, mesh=mesh, weights=weights)


def train_swapped(
    options: Options, mesh: DeviceMesh, text: Text
) -> tuple[list[Step], Figures, IO[bytes] | None]:
    """Train from NVMe; last comes the file of the final weights, if they are to be compared."""
    model, optimizer = shard(options, mesh)
    assert isinstance(optimizer, ShardedOptimizer)
    swap = optimizer.swap
    try:
        steps: list[Step] = []
        before = Traffic.of(swap.stats())
        with StepReporter("from nvme", options.steps) as reporter:
            for step in train(model, optimizer, text, options):
                steps.append(step)
                now = Traffic.of(swap.stats())
                reporter.show(step, now.since(before))
                before = now
        figures = Figures.of(model, steps, swap.stats())
        weights = write_weights(model, options.path) if options.check else None
    finally:
        swap.close()
    return steps, figures, weights


def difference_from_ram(
    options: Options, mesh: DeviceMesh, text: Text, swapped: Sequence[Step], weights: IO[bytes]
) -> str | None:
    """Train again in RAM; what differs first on any rank, or None if not one bit does."""
    plain = options.build_model()
    model, optimizer = shard_in_ram(
        plain,
        blocks_of(plain),
        mesh,
        bf16=options.precision == "bf16",
        learning_rate=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
    )
    in_ram: list[float] = []
    with StepReporter("in RAM", options.steps) as reporter:
        for step in train(model, optimizer, text, options):
            in_ram.append(step.loss)
            reporter.show(step, Traffic())
    loss = first_loss_difference([step.loss for step in swapped], in_ram)
    weight = first_weight_difference(model, weights)  # a collective: not skipped if losses differ
    return agree(loss or weight)


def run(options: Options, mesh: DeviceMesh) -> int:
    """The job on this rank; returns the exit code, which is the same on all ranks."""
    text = load_text(options.text, options.model)
    steps, figures, weights = train_swapped(options, mesh, text)
    figures = figures.over_ranks()
    difference: str | None = None
    if weights is not None:
        gc.collect()  # the swapped model, whose modules refer to each other
        with weights:
            difference = difference_from_ram(options, mesh, text, steps, weights)
    result = Result(steps, figures, checked=options.check, difference=difference)
    if dist.get_rank() == 0:
        result.print()
        if options.json is not None:
            result.write_json(options.json, dataclasses.asdict(options))
    return 1 if difference is not None else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvmeswap.examples.finetune_hf",
        description="Fine-tune a transformers causal language model whose parameters and optimizer "
        "state live on NVMe. For more ranks: torchrun --nproc-per-node 2 -m "
        "nvmeswap.examples.finetune_hf",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--path", type=Path, required=True, metavar="FOLDER", help="for swap files")
    add_arguments(parser)
    add("--lora", action="store_true", help="train adapters by PEFT; the base is read only")
    add("--precision", choices=["fp32", "bf16"], default="fp32",
        help="of forward and backward; the optimizer always works in fp32")
    add("--gradient-checkpointing", action="store_true",
        help="recompute each block in backward instead of keeping activations")
    add("--json", type=Path, metavar="FILE", help="write losses and figures here")
    return parser


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (`sys.argv` by default). Exits with a sentence if it makes no sense."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    problem = conflict(options)
    if problem is not None:
        parser.error(problem)
    return Options(**vars(options))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    backend = "nccl" if options.device == "cuda" else "gloo"
    try:
        with ranks(options.device, backend, repeatable=options.check) as mesh:
            return run(options, mesh)
    except SwapError as error:  # says what to do; a traceback would only hide it
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    leave(main())
