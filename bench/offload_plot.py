"""Seconds a forward and peak memory of all systems, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw(
    path: Path, figures: Mapping[str, float], names: Sequence[str], *, title: str
) -> None:
    """Write a PNG. Who has no figures is left out."""
    shown = [name for name in names if f"{name}_s" in figures][::-1]
    colours = ["tab:orange" if name.startswith("ours") else "tab:blue" for name in shown]
    figure = Figure(figsize=(11, 0.4 * len(shown) + 1.5), dpi=120, layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, ending, label, shape in (
        (left, "s", "seconds a forward", ".3f"), (right, "peak_mb", "peak MB", ",.0f"),
    ):
        values = [figures.get(f"{name}_{ending}", 0.0) for name in shown]
        bars = axes.barh(shown, values, color=colours)
        axes.bar_label(bars, [f"{value:{shape}}" if value else "" for value in values], padding=3)
        axes.set(xlabel=label)
        axes.margins(x=0.15)
    figure.savefig(path, format="png")
