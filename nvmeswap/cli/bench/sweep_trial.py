"""`nvmeswap-bench sweep`: many settings, and the `aio` block of the best."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nvmeswap.cli.bench.device import Device, device_of
from nvmeswap.cli.bench.effective import folder_facts, session_facts
from nvmeswap.cli.bench.labels import labels
from nvmeswap.cli.bench.measuring import Mode, Pattern, Session, Setting, memory_nbytes
from nvmeswap.cli.bench.plot import draw_heat_maps
from nvmeswap.cli.bench.report import binary, show_labels, write_json
from nvmeswap.cli.bench.sweep import Axes, Speeds, Sweep
from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.io.engine import DirectMode
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.timeline import require_matplotlib


def run(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Measure in `folder`, print, and write JSON and PNG. Raises SwapUsageError before anything is
    measured when matplotlib is needed and missing."""
    if not options.no_png:
        require_matplotlib()
    direct = DirectMode[options.direct.upper()]
    probes = [probe_folder(folder, backend=name, direct=direct) for name in options.backends]
    backends = list(dict.fromkeys(probe.backend for probe in probes))
    axes = Axes(backends, options.blocks, options.depths, options.threads)
    sweep, buffered_nbytes = _measure(options, folder, probes[0], axes, console)
    speeds, best = sweep.speeds(), sweep.best()
    facts = _facts(probes[0], device_of(folder), speeds, buffered_nbytes)
    write_json(options.json, {
        "aio": aio_block(best), "best_backend": best.backend, "settings_tried": _tried(speeds),
        **facts,
    })
    show_labels(console, facts["labels"])
    console.print(_table(speeds, best))
    if not options.no_png:
        title = " | ".join([f"{options.path} ({facts['filesystem']})", *facts["labels"]])
        draw_heat_maps(options.png, axes, speeds, title)
        console.print(f"heat maps: {options.png}", soft_wrap=True)
    # Last and unadorned, so that it can be cut out and pasted.
    print(json.dumps({"aio": aio_block(best)}, indent=2))


def _measure(
    options: argparse.Namespace, folder: Path, probe: FolderProbe, axes: Axes, console: Console
) -> tuple[Sweep, int]:
    """What was found, and how many bytes went through the page cache meanwhile."""
    direct = DirectMode[options.direct.upper()]
    largest_block = max(options.blocks)
    file = TrialFile(folder, options.size // largest_block * largest_block, probe)
    most = max(memory_nbytes(setting, file.nbytes) for setting in axes.settings())
    buffered_nbytes = 0
    with (
        Memory(most, registered=options.memory == "registered") as memory,
        _progress(console) as progress,
    ):
        task = progress.add_task("sweep", total=len(axes.settings()) * options.loops)

        def sample(setting: Setting) -> Speeds:
            nonlocal buffered_nbytes
            with Session(file, setting, memory, direct) as session:
                write = session.run(Mode.WRITE, Pattern.SEQUENTIAL)
                read = session.run(Mode.READ, Pattern.SEQUENTIAL)
                buffered_nbytes += session_facts(session)["buffered_nbytes"]
            progress.advance(task)
            return Speeds(read.gb_per_s, write.gb_per_s)

        sweep = Sweep(sample, options.loops)
        search = {"grid": sweep.search_grid, "coordinate": sweep.search_coordinate}
        search[options.search](axes)
        # One axis at a time comes to its end sooner than the bar was made for.
        progress.update(task, total=progress.tasks[0].completed)
    return sweep, buffered_nbytes


def _facts(
    probe: FolderProbe, device: Device, speeds: Mapping[Setting, Speeds], buffered_nbytes: int
) -> dict[str, Any]:
    fastest = max(max(each.read_gb_per_s, each.write_gb_per_s) for each in speeds.values())
    return {
        **folder_facts(probe, device),
        "direct": buffered_nbytes == 0,
        "buffered_nbytes": buffered_nbytes,
        "labels": labels(buffered_nbytes=buffered_nbytes, filesystem=probe.filesystem,
                         device=device, one_way_gb_per_s=fastest),
    }


def _tried(speeds: Mapping[Setting, Speeds]) -> list[dict[str, Any]]:
    return [{**asdict(setting), **asdict(each)} for setting, each in speeds.items()]


def aio_block(setting: Setting) -> dict[str, Any]:
    """What DeepSpeed's JSON says under `aio`. Its two flags have no effect here: the engine always
    batches and always overlaps, as these values ask DeepSpeed to do."""
    return {
        "block_size": setting.block_nbytes,
        "queue_depth": setting.queue_depth,
        "intra_op_parallelism": setting.thread_count,
        "single_submit": False,
        "overlap_events": True,
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )


def _table(speeds: Mapping[Setting, Speeds], best: Setting) -> Table:
    table = Table("backend", "block", "in flight", "read GB/s", "write GB/s")
    for setting, each in speeds.items():
        table.add_row(
            setting.backend, binary(setting.block_nbytes), str(setting.queue_depth),
            f"{each.read_gb_per_s:.2f}", f"{each.write_gb_per_s:.2f}",
            style="bold" if setting == best else None,
        )
    return table
