"""What a person sees: progress while the model trains, and a table of figures at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

from nvmeswap.examples.loop import Step

if TYPE_CHECKING:
    from nvmeswap.zero3 import SwapStats


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes moved to and from the drive, and seconds in which the training loop waited for it."""

    read_nbytes: int = 0
    write_nbytes: int = 0
    stall_s: float = 0.0

    @classmethod
    def of(cls, stats: SwapStats) -> Traffic:
        engine = stats.engine
        waits = [part.stall_s for part in (stats.params, stats.optimizer) if part is not None]
        if engine is None:  # everything is in host memory
            return cls(stall_s=sum(waits))
        return cls(
            engine.read_direct_nbytes + engine.read_buffered_nbytes,
            engine.write_direct_nbytes + engine.write_buffered_nbytes,
            sum(waits),
        )

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.read_nbytes - earlier.read_nbytes,
            self.write_nbytes - earlier.write_nbytes,
            self.stall_s - earlier.stall_s,
        )


class StepReporter:
    """Rank 0's progress bar; into a file or a pipe, ten lines instead."""

    def __init__(self, title: str, step_count: int) -> None:
        self.title = title
        self.step_count = step_count
        self.console = Console(quiet=dist.is_initialized() and dist.get_rank() != 0)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=step_count, detail="")

    def __enter__(self) -> StepReporter:
        self.bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def show(self, step: Step, traffic: Traffic) -> None:
        """Say how `step` went; `traffic` is what moved during it."""
        moved_gb = (traffic.read_nbytes + traffic.write_nbytes) / 1e9
        detail = (
            f"loss {step.loss:.4f}  forward {step.forward_s:.2f} s  backward "
            f"{step.backward_s:.2f} s  step {step.update_s:.2f} s"
        )
        if moved_gb:
            share = traffic.stall_s / step.total_s
            detail += f"  {moved_gb / step.total_s:.2f} GB/s  stall {share:.0%}"
        done = step.index + 1
        self.bar.update(self.task, completed=done, detail=detail)
        every = max(1, self.step_count // 10)
        shown = done <= 3 or done % every == 0 or done == self.step_count
        if shown and not self.console.is_terminal:
            self.console.print(f"{self.title} {done}/{self.step_count}  {detail}", soft_wrap=True)


def peak_rss_nbytes() -> int:
    """The most memory that this process ever had resident, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run took, on one rank; `over_ranks` makes one of all. `step_s` leaves out the first
    step, in which the order of use is recorded and memory is first touched, if there are others.
    """

    parameter_count: int
    arena_nbytes: int
    locked_nbytes: int
    peak_rss_nbytes: int
    nvme_nbytes: int
    read_nbytes: int
    write_nbytes: int
    train_s: float
    stall_s: float
    step_s: float

    @classmethod
    def of(cls, model: nn.Module, steps: list[Step], stats: SwapStats | None) -> Figures:
        traffic = Traffic() if stats is None else Traffic.of(stats)
        settled = steps[1:] or steps
        return cls(
            parameter_count=sum(parameter.numel() for parameter in model.parameters()),
            arena_nbytes=0 if stats is None else stats.arena_nbytes,
            locked_nbytes=0 if stats is None else stats.locked_nbytes,
            peak_rss_nbytes=peak_rss_nbytes(),
            nvme_nbytes=0 if stats is None or stats.store is None else stats.store.allocated_nbytes,
            read_nbytes=traffic.read_nbytes,
            write_nbytes=traffic.write_nbytes,
            train_s=sum(step.total_s for step in steps),
            stall_s=traffic.stall_s,
            step_s=sum(step.total_s for step in settled) / len(settled),
        )

    @property
    def overlap(self) -> float:
        """The share of the training time in which nothing waited for the drive."""
        return 1 - self.stall_s / self.train_s

    def over_ranks(self) -> Figures:
        """Bytes added up over all ranks, but memory and seconds of the rank that had the most."""
        ranks: list[Figures] = [self] * dist.get_world_size()
        dist.all_gather_object(ranks, self)
        return Figures(
            parameter_count=self.parameter_count,
            arena_nbytes=max(rank.arena_nbytes for rank in ranks),
            locked_nbytes=max(rank.locked_nbytes for rank in ranks),
            peak_rss_nbytes=max(rank.peak_rss_nbytes for rank in ranks),
            nvme_nbytes=sum(rank.nvme_nbytes for rank in ranks),
            read_nbytes=sum(rank.read_nbytes for rank in ranks),
            write_nbytes=sum(rank.write_nbytes for rank in ranks),
            train_s=max(rank.train_s for rank in ranks),
            stall_s=max(rank.stall_s for rank in ranks),
            step_s=max(rank.step_s for rank in ranks),
        )


def print_table(title: str, figures: Figures) -> None:
    """The figures in words; memory in MiB, but what crosses to the drive in GB, as drives count."""
    rows = {
        "parameters": f"{figures.parameter_count / 1e6:.1f} M",
        "peak RSS (a rank)": mib(figures.peak_rss_nbytes),
    }
    if figures.arena_nbytes:
        rows |= {
            "arena (a rank)": mib(figures.arena_nbytes),
            "of it page-locked": mib(figures.locked_nbytes),
            "on NVMe": mib(figures.nvme_nbytes),
            "read": f"{figures.read_nbytes / 1e9:.2f} GB",
            "written": f"{figures.write_nbytes / 1e9:.2f} GB",
            "overlap (1 - stall share)": f"{figures.overlap:.1%}",
        }
    rows["seconds a step"] = f"{figures.step_s:.3f}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


@dataclass(frozen=True, slots=True)
class Result:
    """A run's steps on rank 0, its figures over all ranks, and how it compares with the run in
    RAM: `difference` is the first there is, None without one or if not `checked`."""

    steps: Sequence[Step]
    figures: Figures
    checked: bool
    difference: str | None

    def print(self) -> None:
        """The table; the last line says whether the check was passed."""
        print_table(f"{len(self.steps)} steps, {dist.get_world_size()} rank(s)", self.figures)
        if self.difference is not None:
            print(self.difference)
        if self.checked:
            print(f"loss equals in-RAM run: {'yes' if self.difference is None else 'no'}")

    def write_json(self, path: Path, options: dict[str, Any]) -> None:
        content = {
            "figures": {**dataclasses.asdict(self.figures), "overlap": self.figures.overlap},
            "losses": [step.loss for step in self.steps],
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "equals_in_ram_run": self.difference is None if self.checked else None,
            "first_difference": self.difference,
            "options": options,
        }
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
