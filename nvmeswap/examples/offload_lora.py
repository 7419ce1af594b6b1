"""Fine-tune adapters of a transformers model whose frozen base is not on the device.

    python -m nvmeswap.examples.offload_lora --check
    python -m nvmeswap.examples.offload_lora --path /mnt/nvme --model FOLDER --device cuda

Needs `pip install nvmeswap[examples]`. The loop (`train`) is plain PyTorch, transformers and PEFT;
the base is in host memory, with `--path` on NVMe, and on the device one or two blocks at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nvmeswap
from nvmeswap.errors import SwapError
from nvmeswap.examples.check import first_loss_difference
from nvmeswap.examples.hf_arguments import add_arguments, conflict
from nvmeswap.examples.hf_model import build_model, load_text
from nvmeswap.examples.launch import make_repeatable
from nvmeswap.examples.loop import Clock, Step
from nvmeswap.examples.report import StepReporter, Traffic, mib
from nvmeswap.examples.text import Text
from nvmeswap.stats import OffloadStats

Trained = tuple[list[float], dict[str, Tensor]]  # losses, and adapters by name


def build(options: argparse.Namespace) -> Any:
    return build_model(
        options.model, lora=True, bf16=options.bf16, gradient_checkpointing=True, seed=options.seed
    )


def train(model: Any, text: Text, options: argparse.Namespace) -> Iterator[Step]:
    """Train what needs a gradient, yielding each step when it is complete."""
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=options.learning_rate)
    batch, length, seed = options.batch_size, options.sequence_length, options.seed
    for index in range(options.steps):
        clock = Clock(options.device)
        tokens, _ = text.batch(batch, length, seed=seed, step=index, micro_batch=0, rank=0)
        tokens = tokens.to(options.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward_s = clock.lap_s()
        loss.backward()
        backward_s = clock.lap_s()
        optimizer.step()
        optimizer.zero_grad()
        yield Step(index, loss.item(), forward_s, backward_s, clock.lap_s())


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().cpu() for n, p in model.named_parameters() if p.requires_grad}


def follow(title: str, steps: Iterator[Step], options: argparse.Namespace) -> list[float]:
    """The losses; steps are shown as they come."""
    losses = []
    with StepReporter(title, options.steps) as reporter:
        for step in steps:
            losses.append(step.loss)
            reporter.show(step, Traffic())
    return losses


def train_offloaded(options: argparse.Namespace, text: Text) -> tuple[Trained, OffloadStats]:
    model = build(options)
    manager = nvmeswap.OffloadManager(
        model, options.device, path=options.path, granularity="block", prefetch=options.prefetch
    )
    losses = follow("base offloaded", train(model, text, options), options)
    if options.save is not None:
        model.save_pretrained(options.save)  # the adapters
    stats = manager.stats()
    manager.close(restore=False)  # the base may be larger than memory
    return (losses, adapters_of(model)), stats


def first_difference(ours: Trained, options: argparse.Namespace, text: Text) -> str | None:
    """From a run with the whole model on the device; None if they are equal in every bit."""
    model = build(options).to(options.device)
    losses = follow("base resident", train(model, text, options), options)
    theirs = adapters_of(model).items()
    unequal = (name for name, each in theirs if not torch.equal(ours[1][name], each))
    return first_loss_difference(ours[0], losses) or next(unequal, None)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with a sentence if it makes no sense."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--path", type=Path, metavar="FOLDER", help="the base goes to NVMe; else to host memory")
    add_arguments(parser)
    add("--bf16", action="store_true", help="the base is stored and computed in bf16")
    add("--prefetch", type=int, default=1, help="blocks that come ahead of their use")
    add("--save", type=Path, metavar="FOLDER", help="write the adapters here, as PEFT does")
    options = parser.parse_args(arguments)
    if problem := conflict(options):
        parser.error(problem)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.check and options.device == "cuda":
        make_repeatable()
    text = load_text(options.text, options.model)
    try:
        ours, stats = train_offloaded(options, text)
    except SwapError as error:  # says what to do; a traceback would only hide it
        print(error, file=sys.stderr)
        return 1
    print(f"at most {stats.peak_resident_unit_count} of {stats.unit_count} units "
          f"({mib(stats.peak_resident_nbytes)}) on {options.device}; waited {stats.stall_s:.1f} s")
    difference = first_difference(ours, options, text) if options.check else None
    if options.check:
        print("equals resident run: " + ("yes" if difference is None else f"no, {difference}"))
    return 0 if difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
