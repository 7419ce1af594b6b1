"""What can be asked of the programs that fine-tune transformers models."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from nvmeswap.examples.arguments import positive
from nvmeswap.examples.hf_model import load_text, model_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that all of them have; `--path` is each one's own."""
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="a config.json, or a folder with one and "
        "perhaps safetensors and a tokenizer.json; without it, a Llama of 3 M parameters")
    add("--text", type=Path, metavar="FILE",
        help="what to train on; without it, the standard library's sources")
    add("--steps", type=positive, default=20, help="optimizer steps")
    add("--batch-size", type=positive, default=4, help="sequences a step")
    add("--sequence-length", type=positive, default=128, help="tokens")
    add("--learning-rate", type=float, default=3e-4, help="constant")
    add("--seed", type=int, default=0, help="of random weights and batches")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="computes here")
    add("--check", action="store_true",
        help="run again in RAM, compare all losses and the final weights bitwise")


def conflict(options: argparse.Namespace) -> str | None:
    """The first thing asked for that can't be had, in a sentence; None if all is well."""
    path, model, length = options.path, options.model, options.sequence_length
    if path is not None and not path.is_dir():
        return f"--path {path}: there is no such folder"
    if model is not None and not (model.is_file() or (model / "config.json").is_file()):
        return f"--model {model}: there is no config.json"
    if options.text is not None and not options.text.is_file():
        return f"--text {options.text}: there is no such file"
    if options.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU here"
    tokens, config = load_text(options.text, model).tokens, model_config(model)
    if len(tokens) <= length:
        return f"--text {options.text} is shorter than --sequence-length {length}"
    if tokens.max() >= config.vocab_size:
        return f"--model {model} knows {config.vocab_size} tokens, the text has {tokens.max()}"
    return None
