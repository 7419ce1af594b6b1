"""Train a transformer from NVMe, and prove that it equals the run in RAM.

    python -m nvmeswap.examples.train_lm --check
    torchrun --nproc-per-node 2 -m nvmeswap.examples.train_lm --check

The loop itself (`loop.py`) is plain PyTorch; `swapped` below is all that nvmeswap adds.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import nvmeswap.zero3
from nvmeswap.errors import SwapError
from nvmeswap.examples.arguments import Options, parse
from nvmeswap.examples.check import (
    agree,
    first_loss_difference,
    first_weight_difference,
    write_weights,
)
from nvmeswap.examples.launch import leave, ranks
from nvmeswap.examples.loop import Step, train
from nvmeswap.examples.model import Transformer
from nvmeswap.examples.reference import shard_in_ram
from nvmeswap.examples.report import Figures, Result, StepReporter, Traffic
from nvmeswap.examples.text import Text
from nvmeswap.zero3.optimizer import ShardedOptimizer

WEIGHT_DECAY = 0.01


def build_model(options: Options) -> Transformer:
    """The same weights on every rank and in every run with the same seed."""
    torch.manual_seed(options.seed)
    return Transformer(
        options.dim,
        options.layers,
        options.heads,
        options.sequence_length,
        activation_checkpointing=options.activation_checkpointing,
    )


def swap_config(options: Options) -> dict[str, Any]:
    """The DeepSpeed JSON of this run."""
    place: dict[str, Any] = {"device": options.offload}
    if options.nvme_path is not None:
        place["nvme_path"] = str(options.nvme_path)
    params = {**place, "buffer_count": options.buffer_count, "max_in_cpu": options.max_in_cpu}
    return {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": options.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.learning_rate, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": options.sub_group_size,
            "offload_param": params,
            "offload_optimizer": place,
        },
    }


def train_swapped(
    options: Options, mesh: DeviceMesh, text: Text
) -> tuple[list[Step], Figures, IO[bytes] | None]:
    """Train with nvmeswap; last comes the file of the final weights, if they are to be compared."""
    plain = build_model(options).to(options.device)
    model, optimizer = nvmeswap.zero3.shard(plain, swap_config(options), mesh=mesh)
    assert isinstance(optimizer, ShardedOptimizer)
    swap = optimizer.swap
    try:
        steps: list[Step] = []
        before = Traffic.of(swap.stats())
        with StepReporter(f"from {options.offload}", options.steps) as reporter:
            for step in train(model, optimizer, text, options):
                steps.append(step)
                now = Traffic.of(swap.stats())
                reporter.show(step, now.since(before))
                before = now
        figures = Figures.of(model, steps, swap.stats())
        weights = write_weights(model, options.nvme_path) if options.check else None
    finally:
        swap.close()
    return steps, figures, weights


def train_in_ram(
    options: Options, mesh: DeviceMesh, text: Text
) -> tuple[nn.Module, list[Step], Figures]:
    """Train without nvmeswap."""
    plain = build_model(options)
    model, optimizer = shard_in_ram(
        plain,
        plain.blocks,
        mesh,
        bf16=options.precision == "bf16",
        learning_rate=options.learning_rate,
        weight_decay=WEIGHT_DECAY,
    )
    steps: list[Step] = []
    with StepReporter("in RAM", options.steps) as reporter:
        for step in train(model, optimizer, text, options):
            steps.append(step)
            reporter.show(step, Traffic())
    return model, steps, Figures.of(model, steps, None)


def difference_from_ram(
    options: Options, mesh: DeviceMesh, text: Text, swapped: Sequence[Step], weights: IO[bytes]
) -> str | None:
    """Train again in RAM; what differs first on any rank, or None if not one bit does."""
    model, in_ram, _ = train_in_ram(options, mesh, text)
    loss = first_loss_difference([step.loss for step in swapped], [step.loss for step in in_ram])
    weight = first_weight_difference(model, weights)  # a collective: not skipped if losses differ
    return agree(loss or weight)


def run(options: Options, mesh: DeviceMesh) -> int:
    """The job on this rank; returns the exit code, which is the same on all ranks."""
    text = Text.load(options.text)
    difference: str | None = None
    weights: IO[bytes] | None = None
    if options.offload == "none":
        _, steps, figures = train_in_ram(options, mesh, text)
    else:
        steps, figures, weights = train_swapped(options, mesh, text)
    figures = figures.over_ranks()
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with ranks(options.device, options.backend, repeatable=options.check) as mesh:
            return run(options, mesh)
    except SwapError as error:  # says what to do; a traceback would only hide it
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    leave(main())
