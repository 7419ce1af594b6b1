"""The prediction as JSON, and the tables that are made of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from nvmeswap.cli.plan.predict import Change, Machine, Prediction
from nvmeswap.cli.plan.rates import DriveRates
from nvmeswap.cli.plan.wear import Wear
from nvmeswap.swap.optimizer import OPTIMIZER_FILE
from nvmeswap.swap.params import PARAMS_FILE


def content(
    options: argparse.Namespace,
    found: Prediction,
    machine: Machine,
    node: DriveRates,
    other: Sequence[Change],
    worn: Wear,
    *,
    ranks_here: int,
) -> dict[str, Any]:
    """All of it, by names with units. `rates.drives` are a node's."""
    budget = found.budget_nbytes
    device_nbytes = found.footprint.device_peak_nbytes
    return {
        "model": {
            "rank_numel": found.footprint.numel,
            "rank_trained_numel": found.footprint.trained_numel,
            "sub_group_count": len(found.footprint.layouts),
            "sub_groups_in_memory": len(found.footprint.layouts) - len(found.footprint.swapped),
        },
        "bytes": tiers(found),
        "host_memory": {
            "budget_nbytes": budget,
            "smallest_nbytes": found.footprint.smallest_nbytes,
            "fits": found.fits,
        },
        "device_memory": {
            "budget_nbytes": options.device_memory,
            "needed_nbytes": device_nbytes,
            "fits": options.device_memory is None or device_nbytes <= options.device_memory,
        },
        "phases": phases(found, machine),
        "step_s": found.step_s,
        "compute_known": machine.compute is not None,
        "limit": found.limit(machine.drives),
        "wear": asdict(worn),
        "changes": [asdict(change) for change in other],
        "ranks_per_node": ranks_here,
        "rates": {
            "drives": asdict(node),
            "host": asdict(machine.host),
            "compute": None if machine.compute is None else asdict(machine.compute),
        },
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
    }


def tiers(found: Prediction) -> dict[str, dict[str, int]]:
    """Bytes of one rank."""
    footprint = found.footprint
    slots = {name: request.nbytes for name, request in footprint.pools.items()}
    beside = 0 if footprint.gradients_in_arena else footprint.gradient_nbytes
    return {
        "device": {
            "shards_nbytes": footprint.device_nbytes,
            "peak_nbytes": footprint.device_peak_nbytes,
        },
        "host": {
            "parameter_slots_nbytes": slots["parameters"],
            "optimizer_slots_nbytes": slots["optimizer state"],
            "gradient_slots_nbytes": slots["gradients"],
            "arena_nbytes": footprint.arena_nbytes,
            "gradients_nbytes": beside,
            "kept_nbytes": footprint.kept_nbytes,
            "total_nbytes": footprint.host_nbytes,
        },
        "nvme": {
            PARAMS_FILE: footprint.params_file_nbytes,
            OPTIMIZER_FILE: footprint.optimizer_file_nbytes,
        },
    }


def phases(found: Prediction, machine: Machine) -> dict[str, dict[str, Any]]:
    """Seconds and bytes of one step; `host_s` is what the processor (or GPU) needs by itself."""
    passes, stepping = found.passes, found.stepping
    limits = found.limits(machine.drives)
    return {
        "forward": {
            "seconds": passes.forward_s,
            "host_s": passes.forward_host_s,
            "read_nbytes": passes.forward_read_nbytes,
            "write_nbytes": 0,
            "limit": limits["forward"],
        },
        "backward": {
            "seconds": passes.backward_s,
            "host_s": passes.backward_host_s,
            "read_nbytes": passes.backward_read_nbytes,
            "write_nbytes": 0,
            "limit": limits["backward"],
        },
        "step": {
            "seconds": stepping.step_s,
            "host_s": stepping.host_s,
            "update_s": stepping.update_s,
            "read_nbytes": stepping.read_nbytes,
            "write_nbytes": stepping.write_nbytes,
            "drive_read_alone_s": stepping.read_nbytes / machine.drives.read_nbytes_per_s,
            "drive_write_alone_s": stepping.write_nbytes / machine.drives.write_nbytes_per_s,
            "drive_s": stepping.drive_s,
            "limit": limits["step"],
        },
    }


# --- for people -------------------------------------------------------------------------------


def show(console: Console, told: Mapping[str, Any]) -> None:
    """Tables."""
    console.print(_tier_table(told))
    console.print(_phase_table(told))
    for line in _sentences(told):
        console.print(line, soft_wrap=True)
    if told["changes"]:
        console.print(_change_table(told))


def amount(nbytes: float) -> str:
    """1_500_000_000 is 1.50 GB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def _tier_table(told: Mapping[str, Any]) -> Table:
    table = Table(title="bytes of one rank", title_justify="left")
    for name in ("tier", "what", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for tier, parts in told["bytes"].items():
        for what, nbytes in parts.items():
            name = what.removesuffix("_nbytes").replace("_", " ")
            table.add_row(tier, name, f"{nbytes:_}")
    return table


def _phase_table(told: Mapping[str, Any]) -> Table:
    table = Table(title="seconds of one step, predicted", title_justify="left")
    for name in ("phase", "seconds", "by itself", "read", "written", "limit"):
        table.add_column(name, justify="left" if name in ("phase", "limit") else "right")
    for phase, facts in told["phases"].items():
        table.add_row(phase, f"{facts['seconds']:.3f}", f"{facts['host_s']:.3f}",
                      amount(facts["read_nbytes"]), amount(facts["write_nbytes"]), facts["limit"])
    table.add_row("in all", f"{told['step_s']:.3f}", "", "", "", told["limit"])
    return table


def _sentences(told: Mapping[str, Any]) -> list[str]:
    memory, device, worn = told["host_memory"], told["device_memory"], told["wear"]
    lines = []
    if not memory["fits"]:
        lines.append(
            f"[bold red]does not fit[/]: page-locked and other swap memory of "
            f"{told['bytes']['host']['arena_nbytes']:_} bytes a rank, budget "
            f"{memory['budget_nbytes']:_}, the smallest that works {memory['smallest_nbytes']:_}"
        )
    if not device["fits"]:
        lines.append(
            f"[bold red]does not fit the device[/]: {device['needed_nbytes']:_} bytes without "
            "activations; apply fully_shard to smaller modules"
        )
    if not told["compute_known"]:
        lines.append(
            "[bold yellow]computing is not known[/]: the passes are the drive's alone; give "
            "--compute-forward-s and --compute-backward-s, or --factory and --batch"
        )
    lines.append(f"{amount(worn['write_nbytes_per_day'])} are written a day on a node's drives"
                 + _lifetime(worn["lifetime_days"]))
    return lines


def _lifetime(days: float | None) -> str:
    if days is None:
        return ""
    return f": worn out as rated after {days:.0f} days ({days / 365:.1f} years) without a pause"


def _change_table(told: Mapping[str, Any]) -> Table:
    table = Table(title="what to change, best first", title_justify="left")
    for name in ("change", "s a micro-batch", "arena"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for change in told["changes"]:
        table.add_row(change["what"], f"{change['sample_s']:.3f}", f"{change['arena_nbytes']:_}")
    return table
