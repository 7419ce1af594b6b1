"""Heat maps of a sweep, reads and writes side by side, a row of them for each backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nvmeswap.cli.bench.measuring import Setting
from nvmeswap.cli.bench.report import binary
from nvmeswap.cli.bench.sweep import Axes, Speeds
from nvmeswap.timeline import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel


def draw_heat_maps(path: Path, axes: Axes, speeds: Mapping[Setting, Speeds], title: str) -> None:
    """Write a PNG. Settings that were not tried stay blank. Raises SwapUsageError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(11, 1.2 + 3.6 * len(axes.backends)), dpi=120, layout="constrained"
    )
    figure.suptitle(title)
    panels = figure.subplots(len(axes.backends), 2, squeeze=False)
    for (read_panel, write_panel), backend in zip(panels, axes.backends, strict=True):
        read = {each: speed.read_gb_per_s for each, speed in speeds.items()}
        write = {each: speed.write_gb_per_s for each, speed in speeds.items()}
        _draw(read_panel, axes, backend, read, f"read, {backend}")
        _draw(write_panel, axes, backend, write, f"write, {backend}")
    figure.savefig(path, format="png")


def _draw(
    panel: Panel, axes: Axes, backend: str, speeds: Mapping[Setting, float], title: str
) -> None:
    rows = [
        [
            speeds.get(Setting(backend, nbytes, depth, axes.thread_count), float("nan"))
            for depth in axes.queue_depths
        ]
        for nbytes in axes.block_nbytes
    ]
    image = panel.imshow(rows, aspect="auto", origin="lower", cmap="viridis", vmin=0)
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            if value == value:  # not tried: nan
                panel.text(column, row, f"{value:.2f}", ha="center", va="center",
                           bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1})
    panel.set_xticks(range(len(axes.queue_depths)), [str(depth) for depth in axes.queue_depths])
    panel.set_yticks(range(len(axes.block_nbytes)), [binary(size) for size in axes.block_nbytes])
    panel.set(title=title, xlabel="blocks in flight", ylabel="block")
    assert panel.figure is not None
    panel.figure.colorbar(image, ax=panel, label="GB/s")
