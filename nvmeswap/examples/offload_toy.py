"""Train ten layers with two of them on the device at a time, and prove that nothing else differs.

    python -m nvmeswap.examples.offload_toy --check
    python -m nvmeswap.examples.offload_toy --size 4096 --rows 512 --steps 100 --device cuda

Weights, gradients and AdamW's states are in host memory; with `--path` weights and states on NVMe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.optim import AdamW, Optimizer

import nvmeswap
from nvmeswap.examples.arguments import positive
from nvmeswap.examples.launch import make_repeatable
from nvmeswap.examples.loop import Clock
from nvmeswap.examples.report import mib, peak_rss_nbytes

LAYERS = 10
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}


class Toy(nn.Module):
    """Linear layers, each after a norm, beside a residual; always with the same weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(layer_norm(x, x.shape[-1:]))
        return x


def train(model: nn.Module, optimizer: Optimizer, options: argparse.Namespace) -> Iterator[float]:
    """A plain loop; yields the seconds of each step."""
    torch.manual_seed(1)
    x = torch.randn(options.rows, options.size, device=options.device)
    for _ in range(options.steps):
        clock = Clock(options.device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield clock.lap_s()


def train_offloaded(options: argparse.Namespace) -> tuple[Toy, list[float], int]:
    """The trained model, seconds a step, and bytes of weights on the device at the most."""
    model, path = Toy(options.size), options.path
    with nvmeswap.OffloadManager(
        model, options.device, path=path, trainable="nvme" if path else "cpu"
    ) as manager:
        if path is None:
            seconds = list(train(model, AdamW(model.parameters(), **ADAMW), options))
        else:
            optimizer = manager.optimizer(AdamW, **ADAMW)
            seconds = list(train(model, optimizer, options))
            optimizer.close()
        return model, seconds, manager.stats().peak_resident_nbytes


class UpdateOnHost(AdamW):
    """AdamW on copies in host memory, since a GPU's AdamW rounds otherwise than a processor's."""

    def __init__(self, model: nn.Module) -> None:
        self._shown = list(model.parameters())
        copies = [parameter.detach().to("cpu", copy=True) for parameter in self._shown]
        super().__init__(copies, **ADAMW)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        copies = self.param_groups[0]["params"]
        for copy, shown in zip(copies, self._shown, strict=True):
            assert shown.grad is not None
            copy.grad, shown.grad = shown.grad.cpu(), None
        super().step()
        for copy, shown in zip(copies, self._shown, strict=True):
            shown.copy_(copy)


def first_difference(model: nn.Module, options: argparse.Namespace) -> str | None:
    """The first weight that differs in any bit from that of a run with all layers on the device."""
    resident = Toy(options.size).to(options.device)
    list(train(resident, UpdateOnHost(resident), options))
    pairs = zip(model.named_parameters(), resident.parameters(), strict=True)
    return next((name for (name, ours), its in pairs if not torch.equal(ours, its.cpu())), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--size", type=positive, default=256, help="of each layer: its weight is size x size")
    add("--rows", type=positive, default=64, help="of the input")
    add("--steps", type=positive, default=10, help="optimizer steps")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="computes here")
    add("--path", type=Path, metavar="FOLDER", help="weights and optimizer states go to NVMe")
    add("--check", action="store_true", help="train again on the device, compare weights bitwise")
    options = parser.parse_args(arguments)
    if options.check and options.device == "cuda":
        make_repeatable()

    model, seconds, peak_nbytes = train_offloaded(options)
    settled = seconds[1:] or seconds  # the first records the order of use, and touches memory
    total_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    on_gpu = options.device == "cuda"
    memory = torch.cuda.max_memory_allocated() if on_gpu else peak_rss_nbytes()
    print(f"{1e3 * sum(settled) / len(settled):.1f} ms a step; {mib(total_nbytes)} of weights, at "
          f"most {mib(peak_nbytes)} on {options.device} at a time")
    print(f"peak {'GPU memory' if on_gpu else 'RSS'} {mib(memory)}")
    if not options.check:
        return 0
    difference = first_difference(model, options)
    print("weights equal resident run: " + (f"no, {difference}" if difference else "yes"))
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
