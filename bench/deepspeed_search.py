"""Which settings DeepSpeed's pipelined optimizer swapper is fastest with, and which it can't bear.

One axis at a time, from a setting that is known to run: all combinations would take hours.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from mlp import BLOCK_PARAMETERS, HIDDEN
from report import Report
from worker import Worker, WorkerFailed

Settings = dict[str, Any]
START: Settings = {
    # Three sub-groups in flight are 12 buffers: four each, for three states and a gradient. Fewer
    # stop it (4 and 5 in the first step, 8 in the second), more only take memory.
    "buffer_count": 12, "sub_group_size": 30_000_000, "queue_depth": 32, "block_size": 1 << 20,
    "intra_op_parallelism": 2, "pin_memory": False,
}
AXES: dict[str, list[Any]] = {
    "buffer_count": [4, 5, 8, 16],  # 4: its default
    "sub_group_size": [15_000_000, 60_000_000, 1_000_000_000],  # the last: its default
    "queue_depth": [8, 64],  # 8: its default
    "block_size": [256 << 10, 4 << 20],
    "intra_op_parallelism": [1, 4],
    "pin_memory": [True],
}
_CLEARLY = 0.95
WARM_UP_STEPS = 2  # the first has no state yet, the second is the first to read all of it


@dataclass
class Found:
    """`best` is None when nothing ran. `tried`: settings with "step_s" and "peak_nbytes", or
    "failed"."""

    best: Settings | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def deepspeed(python: str, folder: Path, blocks: int, settings: Settings) -> Iterator[Worker]:
    """A worker that has made its first steps; its files are removed afterwards. Raises
    WorkerFailed."""
    files = folder / "deepspeed"
    try:
        with Worker(python, "deepspeed_step.py") as worker:
            worker.ask(folder=str(files), blocks=blocks, settings=settings)
            for _ in range(WARM_UP_STEPS):
                worker.ask()
            yield worker
    finally:
        shutil.rmtree(files, ignore_errors=True)


Attempt = Callable[[Settings], list[dict[str, Any]]]
"""The answers of some steps with these settings; raises WorkerFailed."""


def search(start: Settings, axes: Mapping[str, list[Any]], attempt: Attempt) -> Found:
    """The best of each axis is kept for the next, by medians. What is no faster than noise does not
    replace what came before: chance must not pick what takes more memory."""
    found = Found()
    best_s = _try(found, start, attempt)
    if best_s is not None:
        found.best = start
    for axis, values in axes.items():
        base = found.best or start
        for value in values:
            step_s = _try(found, {**base, axis: value}, attempt)
            if step_s is not None and (best_s is None or step_s < _CLEARLY * best_s):
                best_s, found.best = step_s, {**base, axis: value}
    return found


def optimizer_attempt(python: str, folder: Path, blocks: int, *, steps: int) -> Attempt:
    """Of deepspeed_step.py."""

    def attempt(settings: Settings) -> list[dict[str, Any]]:
        _require_memory(blocks, settings)
        with deepspeed(python, folder, blocks, settings) as worker:
            return [worker.ask() for _ in range(steps)]

    return attempt


def search_once(file: Path | None, run: Callable[[], Found]) -> Found:
    """What `file` says if there is one, else what `run` finds, kept in it."""
    if file is not None and file.exists():
        return Found(**json.loads(file.read_text()))
    found = run()
    if file is not None:
        file.write_text(json.dumps({"best": found.best, "tried": found.tried}, indent=1) + "\n")
    return found


def tell(found: Found, report: Report) -> None:
    """All that was tried, as notes and runs."""
    report.runs.extend({"section": "deepspeed settings", **each} for each in found.tried)
    for each in found.tried:
        if "failed" in each:
            settings = {name: value for name, value in each.items() if name != "failed"}
            report.note(f"DeepSpeed failed with {settings}: {each['failed']}")
    report.note(f"DeepSpeed's best settings: {found.best}")


def _require_memory(blocks: int, settings: Settings) -> None:
    """A machine that runs out of memory tells nobody what else DeepSpeed can do."""
    # It fills a sub-group until it has reached the size: with up to one weight more.
    numel = min(settings["sub_group_size"] + 4 * HIDDEN * HIDDEN, blocks * BLOCK_PARAMETERS)
    nbytes = settings["buffer_count"] * numel * 4
    free_nbytes = psutil.virtual_memory().available
    if nbytes > free_nbytes // 2:
        raise WorkerFailed(f"not tried: buffers of {nbytes / 1e9:.0f} GB, "
                           f"of {free_nbytes / 1e9:.0f} GB that are free")


def _try(found: Found, settings: Settings, attempt: Attempt) -> float | None:
    try:
        answers = attempt(settings)
    except WorkerFailed as error:
        found.tried.append({**settings, "failed": str(error)})
        print(f"DeepSpeed, {settings}: {error}", file=sys.stderr)
        return None
    step_s = statistics.median(answer["wall_s"] for answer in answers)
    found.tried.append({**settings, "step_s": step_s, "peak_nbytes": answers[-1]["peak_nbytes"]})
    print(f"DeepSpeed, {settings}: {step_s:.2f} s a step", file=sys.stderr)
    return step_s
