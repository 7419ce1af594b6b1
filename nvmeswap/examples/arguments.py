"""What can be asked of the training job, and which requests make no sense together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked. Counts are per rank; `nvme_path` is set when `offload` is nvme."""

    dim: int
    layers: int
    heads: int
    sequence_length: int
    batch_size: int
    steps: int
    accumulation: int
    learning_rate: float
    seed: int
    precision: str
    activation_checkpointing: bool
    device: str
    backend: str
    offload: str
    nvme_path: Path | None
    max_in_cpu: int
    sub_group_size: int
    buffer_count: int
    check: bool
    json: Path | None
    text: Path | None


def positive(value: str) -> int:
    number = int(value.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return number


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvmeswap.examples.train_lm",
        description="Train a byte-level transformer whose parameters and optimizer state live on "
        "NVMe. For more ranks: torchrun --nproc-per-node 2 -m nvmeswap.examples.train_lm",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=positive, default=512, help="width")
    model.add_argument("--layers", type=positive, default=6, help="blocks")
    model.add_argument("--heads", type=positive, default=8, help="attention heads; they divide dim")
    model.add_argument("--sequence-length", type=positive, default=128, help="tokens")

    training = parser.add_argument_group("training")
    training.add_argument("--text", type=Path, metavar="FILE",
                          help="what to train on; without it, the standard library's sources")
    training.add_argument("--batch-size", type=positive, default=4, help="sequences a micro-batch")
    training.add_argument("--accumulation", type=positive, default=1, help="micro-batches a step")
    training.add_argument("--steps", type=positive, default=20, help="optimizer steps")
    training.add_argument("--learning-rate", type=float, default=3e-4, help="at its highest")
    training.add_argument("--seed", type=int, default=0, help="of weights and batches")
    training.add_argument("--precision", choices=["fp32", "bf16"], default="fp32",
                          help="of forward and backward; the optimizer always works in fp32")
    training.add_argument("--activation-checkpointing", action="store_true",
                          help="recompute each block in backward instead of keeping activations")
    training.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="computes here")
    training.add_argument("--backend", choices=["gloo", "nccl"],
                          help="of the collectives; without it, nccl on cuda and gloo on cpu")

    swap = parser.add_argument_group("where parameters and optimizer state live")
    swap.add_argument("--offload", choices=["nvme", "cpu", "none"], default="nvme",
                      help="none is PyTorch's own FSDP2, without nvmeswap")
    swap.add_argument("--nvme-path", type=Path, metavar="FOLDER",
                      help="for swap files; without it, ./nvme_swap, which is made")
    swap.add_argument("--max-in-cpu", type=int, default=0, metavar="ELEMENTS",
                      help="parameter elements kept in RAM between uses")
    swap.add_argument("--sub-group-size", type=positive, default=4_000_000, metavar="ELEMENTS",
                      help="parameters whose optimizer state moves together")
    swap.add_argument("--buffer-count", type=positive, default=3, metavar="SLOTS",
                      help="slots in RAM for each size of parameter shard")

    result = parser.add_argument_group("result")
    result.add_argument("--check", action="store_true",
                        help="run again in RAM, compare all losses and the final weights bitwise")
    result.add_argument("--json", type=Path, metavar="FILE", help="write losses and figures here")
    return parser


def conflict(options: argparse.Namespace) -> str | None:
    """The first thing asked for that can't be had, in a sentence; None if all is well."""
    if options.dim % options.heads:
        return f"--heads {options.heads} does not divide --dim {options.dim}"
    if options.max_in_cpu < 0:
        return f"--max-in-cpu {options.max_in_cpu} is negative"
    if options.offload != "nvme" and options.nvme_path is not None:
        return f"--nvme-path has no use with --offload {options.offload}"
    if options.offload != "nvme" and options.max_in_cpu:
        return f"--max-in-cpu has no use with --offload {options.offload}"
    if options.offload == "none" and options.check:
        return "--check compares a swapped run with the run in RAM; --offload none swaps nothing"
    if options.device == "cpu" and options.backend == "nccl":
        return "--backend nccl needs --device cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU here"
    if options.text is not None and not options.text.is_file():
        return f"--text {options.text}: there is no such file"
    if options.text is not None and options.text.stat().st_size <= options.sequence_length:
        return f"--text {options.text} is shorter than --sequence-length {options.sequence_length}"
    return None


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line (`sys.argv` by default). Exits with a sentence if it makes no sense."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    problem = conflict(options)
    if problem is not None:
        parser.error(problem)
    if options.backend is None:
        options.backend = "nccl" if options.device == "cuda" else "gloo"
    if options.offload == "nvme" and options.nvme_path is None:
        options.nvme_path = Path("nvme_swap")
        options.nvme_path.mkdir(exist_ok=True)
    return Options(**vars(options))
