"""Losses of all contenders on one pair of axes, and beside it the seconds of their phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from zero3_answers import PHASES


def draw(
    path: Path, losses: Mapping[str, Sequence[float]], figures: Mapping[str, float]
) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in losses.items():
        left.plot(range(1, len(values) + 1), values, label=name, alpha=0.7, marker=".")
    left.set(xlabel="step", ylabel="loss", yscale="log", title="loss")
    left.legend()
    begun = [0.0] * len(losses)
    for phase in PHASES:
        seconds = [figures[f"{name}_{phase}_s"] for name in losses]
        right.bar(list(losses), seconds, bottom=begun, label=phase)
        begun = [low + high for low, high in zip(begun, seconds, strict=True)]
    right.set(ylabel="seconds a step", title="phases (medians)")
    right.legend()
    figure.savefig(path, format="png")
