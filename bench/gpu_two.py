"""Step `two`: two GPUs of one host, started by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_told import Options, detail, figure, note, options, skip

_RANKS = 2
_BOUND = 1e-3
"""Of a loss, relative: sums over ranks are made in another order, and AdamW's first steps turn
gradients near zero by their sign."""
_RATE_TARGET = 0.9


def launch(given: Options, ranks: int, part: str) -> dict[str, Any]:
    """What rank 0 found of gpu_two_ranks.py."""
    folder = given.folder / f"{part}{ranks}"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", str(Path(__file__).with_name("gpu_two_ranks.py")), part,
         str(folder), given.device],
        check=True,
    )
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def compare_losses(two: list[float], one: list[float]) -> None:
    """Means of the two ranks' losses, and those of one rank with both batches."""
    largest = max(abs(a - b) / abs(b) for a, b in zip(two, one, strict=True))
    detail("losses", {"two": two, "one": one})
    figure("two_losses_relative_difference", largest, target=_BOUND, at_most=True)


def main(given: Options) -> None:
    if not given.rehearses and torch.cuda.device_count() < _RANKS:
        skip(f"{torch.cuda.device_count()} GPU here")
    of_two = launch(given, _RANKS, "losses")
    compare_losses(of_two["losses"], launch(given, 1, "losses")["losses"])
    for name, differs in of_two["differences"].items():
        figure(f"two_equality_{name}", float(differs is None), target=1.0)
        if differs is not None:
            note(f"{name} on two ranks: {differs}")
    rate = launch(given, _RANKS, "rate")
    detail("rate", rate)
    figure("two_optimizer_floor_over_step", rate["floor_over_step"], ours=rate["step_s"],
           peer=rate["floor_s"], unit="s", of="drive alone", target=_RATE_TARGET)


if __name__ == "__main__":
    main(options(__doc__))
