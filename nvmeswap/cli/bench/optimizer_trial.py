"""`nvmeswap-bench optimizer`: a step whose state is on the drive, beside its floor."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nvmeswap.cli.bench.device import device_of
from nvmeswap.cli.bench.effective import folder_facts
from nvmeswap.cli.bench.labels import labels
from nvmeswap.cli.bench.measuring import Setting
from nvmeswap.cli.bench.optimizer_floor import (
    Floor,
    FloorTrial,
    UpdateAlone,
    trial_file_nbytes,
)
from nvmeswap.cli.bench.report import folder_rows, show_figures, show_labels, write_json
from nvmeswap.cli.bench.trial import TrialFile
from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.io.engine import DirectMode
from nvmeswap.io.probe import FolderProbe, probe_folder
from nvmeswap.stats import OptimizerStats
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.timeline import Timeline, require_matplotlib

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-4}),
}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TENSOR_NUMEL = 4096 * 4096  # of each parameter but the last, as a large layer has
# The first step reads no moments, and what the second finds in memory the first has left there.
_WARM_UP_STEPS = 2
_TRACED_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step took and moved; the counters' names are those of `OptimizerStats`."""

    step_s: float
    stall_s: float
    update_s: float
    read_nbytes: int
    write_nbytes: int
    hit_count: int

    @property
    def gb_per_s(self) -> float:
        return (self.read_nbytes + self.write_nbytes) / 1e9 / self.step_s


def run(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Measure in `folder`, print, and write JSON, trace and PNG. Raises SwapUsageError before
    anything is measured when matplotlib is needed and missing."""
    if options.png is not None:
        require_matplotlib()
    figures = measure(options, folder)
    settings = {
        name: value for name, value in vars(options).items() if name not in ("json", "trace", "png")
    }
    write_json(options.json, {**figures, "settings": settings})
    show_labels(console, figures["labels"])
    title = (f"{options.optimizer}, {options.parameters:_} parameters in {options.dtype}, "
             f"{figures['sub_group_count']} sub-groups")
    show_figures(console, title, [*_rows(figures), *folder_rows(figures)])
    for path in (options.trace, options.png):
        if path is not None:
            console.print(f"{_TRACED_STEPS} steps: {path}", soft_wrap=True)


def _rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    floor = figures["floor"]
    steps_s = figures["steps_s"]
    return [
        ("step", f"{figures['step_s']:.3f} s ({min(steps_s):.3f} to {max(steps_s):.3f} in "
                 f"{len(steps_s)} steps)"),
        ("phases", f"{figures['update_s']:.3f} s updating, {figures['stall_s']:.3f} s waiting for "
                   "the drive"),
        ("bytes", f"{figures['read_nbytes']:_} read, {figures['write_nbytes']:_} written, "
                  f"{figures['gb_per_s']:.2f} GB/s"),
        ("hits", f"{figures['hit_count']} of {figures['sub_group_count']} sub-groups"),
        ("floor", f"{figures['floor_s']:.3f} s: update {floor['update_s']:.3f} s; bytes "
                  f"{floor['at_once_s']:.3f} s at once, {floor['in_turn_s']:.3f} s in turn"),
        ("achieved/floor", f"{figures['achieved_over_floor']:.3f}"),
        ("memory", f"{figures['peak_nbytes'] / 1e9:.2f} GB at most, "
                   f"{figures['held_nbytes'] / 1e9:.2f} GB before there was an optimizer"),
    ]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures: medians over the steps, the ratio's over the steps' own ratios. A floor is
    measured after each step, since drives change from one second to the next.

    `peak_nbytes` is resident memory of the whole process until then: the floor's is not in it.
    """
    direct = DirectMode[options.direct.upper()]
    probe = probe_folder(folder, backend=options.backend, direct=direct)
    parameters = _parameters(options.parameters, _DTYPES[options.dtype])
    held_nbytes = _memory_nbytes("VmRSS")
    optimizer = _optimizer(options, probe, folder, parameters)
    try:
        for _ in range(_WARM_UP_STEPS):
            step = _timed_step(optimizer)
        peak_nbytes = _memory_nbytes("VmHWM")
        steps, floors = _steps_and_floors(options, probe, folder, optimizer, step)
        _trace(options, optimizer)
        sub_group_count = optimizer.stats().sub_group_count
    finally:
        optimizer.close()
    device = device_of(folder)
    fastest = max(max(each.read_gb_per_s, each.write_gb_per_s) for each in floors)
    return {
        **_figures(steps, floors),
        "sub_group_count": sub_group_count,
        "peak_nbytes": peak_nbytes,
        "held_nbytes": held_nbytes,
        **folder_facts(probe, device),
        "labels": labels(
            buffered_nbytes=0 if probe.direct else step.write_nbytes,
            filesystem=probe.filesystem, device=device, one_way_gb_per_s=fastest,
        ),
    }


def _parameters(numel: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Random, with random gradients."""
    parameters = []
    for begin in range(0, numel, _TENSOR_NUMEL):
        count = min(_TENSOR_NUMEL, numel - begin)
        # Drawn in place, in its own dtype: nothing else is to count as memory.
        parameter = torch.nn.Parameter(torch.empty(count, dtype=dtype).uniform_(-0.02, 0.02))
        parameter.grad = torch.empty(count, dtype=dtype).uniform_(-1e-3, 1e-3)
        parameters.append(parameter)
    return parameters


def _optimizer(
    options: argparse.Namespace, probe: FolderProbe, folder: Path,
    parameters: Sequence[torch.nn.Parameter],
) -> SwappedOptimizer:
    kind, arguments = _KINDS[options.optimizer]
    return SwappedOptimizer(
        kind, parameters, **arguments, nvme_path=folder, sub_group_size=options.sub_group_size,
        buffer_count=options.buffers,
        swap=SwapBlock(backend=probe.backend, direct=options.direct,
                       host_memory_nbytes=options.memory_limit),
        aio=AioConfig(block_size=options.block, queue_depth=options.depth,
                      intra_op_parallelism=options.threads),
    )


def _timed_step(optimizer: SwappedOptimizer) -> StepFigures:
    before = optimizer.stats()
    began_s = time.perf_counter()
    optimizer.step()
    step_s = time.perf_counter() - began_s
    return _difference(step_s, before, optimizer.stats())


def _difference(step_s: float, before: OptimizerStats, after: OptimizerStats) -> StepFigures:
    return StepFigures(
        step_s=step_s,
        stall_s=after.stall_s - before.stall_s,
        update_s=after.update_s - before.update_s,
        read_nbytes=after.read_nbytes - before.read_nbytes,
        write_nbytes=after.write_nbytes - before.write_nbytes,
        hit_count=after.hit_count - before.hit_count,
    )


def _steps_and_floors(
    options: argparse.Namespace, probe: FolderProbe, folder: Path, optimizer: SwappedOptimizer,
    last: StepFigures,
) -> tuple[list[StepFigures], list[Floor]]:
    """In turns. `last`: a step that moved what these will move."""
    setting = Setting(probe.backend, options.block, options.depth, options.threads)
    moved = {"read_nbytes": last.read_nbytes, "write_nbytes": last.write_nbytes}
    kind, arguments = _KINDS[options.optimizer]
    update = UpdateAlone(kind, options.parameters, **arguments)
    file = TrialFile(folder, trial_file_nbytes(setting, **moved), probe)
    steps, floors = [], []
    direct = DirectMode[options.direct.upper()]
    with FloorTrial(file, setting, direct, update, **moved) as floor:
        for _ in range(options.steps):
            steps.append(_timed_step(optimizer))
            floors.append(floor.measure())
    return steps, floors


def _trace(options: argparse.Namespace, optimizer: SwappedOptimizer) -> None:
    """A few steps more, one after the other."""
    if options.trace is None and options.png is None:
        return
    optimizer.timeline = timeline = Timeline()
    for _ in range(_TRACED_STEPS):
        optimizer.step()
    if options.trace is not None:
        timeline.write_perfetto(options.trace)
    if options.png is not None:
        timeline.draw(options.png)


def _figures(steps: Sequence[StepFigures], floors: Sequence[Floor]) -> dict[str, Any]:
    def median(name: str, of: Sequence[StepFigures] | Sequence[Floor] = steps) -> float:
        return float(statistics.median(getattr(each, name) for each in of))

    counts = ("read_nbytes", "write_nbytes", "hit_count")
    return {
        **{name: median(name) for name in ("step_s", "stall_s", "update_s")},
        **{name: statistics.median_low(getattr(each, name) for each in steps) for name in counts},
        "gb_per_s": median("gb_per_s"),
        "steps_s": [each.step_s for each in steps],
        "floor": {name: median(name, floors) for name in asdict(floors[0])},
        "floor_s": median("floor_s", floors),
        "achieved_over_floor": statistics.median(
            floor.floor_s / step.step_s for step, floor in zip(steps, floors, strict=True)
        ),
    }


def _memory_nbytes(field: str) -> int:
    """VmRSS, resident now, or VmHWM, its peak since the process began."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
