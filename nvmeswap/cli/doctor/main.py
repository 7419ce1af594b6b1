"""`nvmeswap doctor`: looks at everything, changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nvmeswap.cli.bench.arguments import size
from nvmeswap.cli.doctor import folder, kernel, memory, software
from nvmeswap.cli.doctor.finding import Finding, Status
from nvmeswap.cli.report_json import write

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", type=Path, action="append", default=[], metavar="DIR",
                        help="a folder to be swapped to; again for each drive")
    parser.add_argument("--need", type=size, default="1G", metavar="SIZE",
                        help="swap memory of a rank, as `nvmeswap plan` says (1G)")
    parser.add_argument("--json", metavar="FILE", help="write it here, too; - for only there")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, with warnings too; 1 if anything failed."""
    found = list(_findings(options))
    worst = _worst(found)
    write(options.json, content(found))
    if options.json != "-":
        _show(Console(), found)
    return 1 if worst is Status.FAIL else 0


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    for path in options.path:
        yield from folder.check(path)
    yield from kernel.check()
    yield from memory.check(options.need)
    yield from software.check()


def _worst(found: Sequence[Finding]) -> Status:
    order = list(Status)
    return max((finding.status for finding in found), key=order.index)


def content(found: Sequence[Finding]) -> dict[str, Any]:
    """All findings, and the worst status among them."""
    return {
        "status": _worst(found).value,
        "findings": [
            {"name": each.name, "status": each.status.value, "what": each.what, "fix": each.fix,
             "facts": dict(each.facts)}
            for each in found
        ],
    }


def _show(console: Console, found: Sequence[Finding]) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for each in found:
        fix = "" if each.fix is None else f"\n[bold]fix[/] {escape(each.fix)}"
        status = f"[{_COLOURS[each.status]}]{each.status.value}[/]"
        table.add_row(status, each.name, escape(each.what) + fix)
    console.print(table)
