"""What tools/gpu-check found, as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_COLOURS = {True: "green", False: "red", None: ""}
_LONGEST = 200
_MOST_BARS = 40

Steps = Mapping[str, Mapping[str, Any]]


def show(steps: Steps, notes: Sequence[str]) -> None:
    """The table on stdout: a figure beside its peer and its target; steps that ended badly; notes.
    Where all figures of a step that say yes or no are met, they are one row."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("figure", "ours", "peer", "value", "target", ""):
        table.add_column(heading, justify="left" if heading == "figure" else "right",
                         overflow="fold")
    for name, step in steps.items():
        table.add_section()
        for figure in _shortened(name, step["figures"]):
            table.add_row(*_row(figure))
        if step["status"] != "done":
            table.add_row(f"[bold]{name}[/]", "", "", "", "", f"[yellow]{step['status']}[/]")
    console = Console(width=118, soft_wrap=False)
    console.print(table)
    for name, step in steps.items():
        said = step["reason"]
        if said:
            console.print(f"{name}, {step['status']} after {step['seconds']:.0f} s: "
                          f"{said[-_LONGEST:]}", markup=False, highlight=False)
    for note in notes:
        console.print(f"note: {note[:_LONGEST]}", markup=False, highlight=False)


def _shortened(
    step: str, figures: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    yes = [each for each in figures if each["target"] == 1.0 and each["passed"]
           and each["ours"] is None]
    if len(yes) < 2:
        return figures
    names = ", ".join(each["name"].removeprefix(f"{step}_") for each in yes)
    kept = [each for each in figures if each not in yes]
    return [*kept, {**yes[0], "name": f"{step}: {names}", "value": float(len(yes)),
                    "target": float(len(yes))}]


def _row(figure: Mapping[str, Any]) -> tuple[str, ...]:
    peer = _number(figure["peer"], figure["unit"])
    if peer and figure["of"]:
        peer += f" ({figure['of']})"
    has_target = figure["target"] is not None
    bound = "at most " if figure["at_most"] else ""
    verdict = {True: "pass", False: "MISS", None: ""}[figure["passed"]]
    colour = _COLOURS[figure["passed"]]
    value = "" if figure["value"] == figure["ours"] else _number(figure["value"], "")
    return (
        figure["name"], _number(figure["ours"], figure["unit"]), peer, value,
        f"{bound}{_number(figure['target'], '')}" if has_target else "",
        f"[{colour}]{verdict}[/]" if verdict else "",
    )


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}".strip()


def draw(path: Path, steps: Steps) -> str | None:
    """A bar for each figure that has a peer and a target: its share of the target, 1 being just
    met. Returns why there is no plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: {error}"
    figures = [each for step in steps.values() for each in step["figures"]
               if each["target"] and each["ours"] is not None and each["value"]][:_MOST_BARS]
    if not figures:
        return "no plot: no figure has a peer"
    shares = [each["target"] / each["value"] if each["at_most"] else each["value"] / each["target"]
              for each in figures]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(figures)), dpi=120, layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([each["name"] for each in figures], shares,
                     color=["tab:green" if each["passed"] else "tab:red" for each in figures])
    axes.bar_label(bars, [f" {each['value']:.2f}" for each in figures])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="share of the target; the value beside the bar", title="tools/gpu-check")
    figure.savefig(path, format="png")
    return None
