"""`nvmeswap-bench io`: one setting."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nvmeswap.cli.bench.device import device_of
from nvmeswap.cli.bench.effective import folder_facts, session_facts
from nvmeswap.cli.bench.labels import labels
from nvmeswap.cli.bench.measuring import Mode, Pattern, Session, Setting, memory_nbytes
from nvmeswap.cli.bench.report import (
    binary,
    folder_rows,
    microseconds,
    session_rows,
    show_figures,
    show_labels,
    write_json,
)
from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.io.engine import DirectMode
from nvmeswap.io.probe import probe_folder
from nvmeswap.swap.space import GDS_THREAD_COUNT


def run(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Measure in `folder`, print, and write the JSON."""
    figures = measure(options, folder)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {**figures, "settings": settings})
    speeds = figures["loops_gb_per_s"]
    rows = [
        ("speed", f"{figures['gb_per_s']:.2f} GB/s ({min(speeds):.2f} to {max(speeds):.2f} in "
                  f"{len(speeds)} loops)"),
        ("processor", f"{figures['cpu_s_per_gb']:.4f} s per GB"),
        ("a block", f"{microseconds(figures['block_p50_s'])} p50, "
                    f"{microseconds(figures['block_p99_s'])} p99"),
        *session_rows(figures),
        *folder_rows(figures),
    ]
    title = (f"{options.mode}, {options.pattern}, {binary(options.block)} x {options.depth} "
             f"in flight, file of {binary(options.size)}")
    show_labels(console, figures["labels"])
    show_figures(console, title, rows)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures and what was in use. `gb_per_s` of mixed: both ways together."""
    mode, pattern = Mode(options.mode), Pattern(options.pattern)
    direct = DirectMode[options.direct.upper()]
    probe = probe_folder(folder, backend=options.backend, direct=direct)
    device = device_of(folder)
    setting = Setting(probe.backend, options.block, options.depth, options.threads)
    if options.gds:
        threads = max(options.threads, GDS_THREAD_COUNT)
        setting = replace(setting, backend="gds", thread_count=threads)
    nbytes = options.size // options.block * options.block
    file = TrialFile(folder, nbytes, probe)
    is_registered = options.memory == "registered"
    wanted_nbytes = memory_nbytes(setting, nbytes)
    with Memory(
        wanted_nbytes, registered=is_registered, device=options.device
    ) as memory, Session(file, setting, memory, direct) as session:
        passes = [session.run(mode, pattern) for _ in range(options.loops)]
        latency = session.block_latency(mode, pattern)
        facts = session_facts(session)
    gb_per_s = statistics.median(each.gb_per_s for each in passes)
    return {
        "gb_per_s": gb_per_s,
        "loops_gb_per_s": [each.gb_per_s for each in passes],
        "cpu_s_per_gb": statistics.median(each.cpu_s_per_gb for each in passes),
        "block_p50_s": latency.p50_s,
        "block_p99_s": latency.p99_s,
        **folder_facts(probe, device),
        "backend": setting.backend,
        **facts,
        "labels": labels(
            buffered_nbytes=facts["buffered_nbytes"],
            filesystem=probe.filesystem,
            device=device,
            one_way_gb_per_s=gb_per_s / 2 if mode is Mode.MIXED else gb_per_s,
        ),
    }
