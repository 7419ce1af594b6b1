"""What a person reads, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_UNITS = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))


def binary(nbytes: int) -> str:
    """As it is typed: 524288 is 512K."""
    for unit, letter in _UNITS:
        if nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def show_labels(console: Console, labels: Sequence[str]) -> None:
    """On a line of their own that is never broken, so that scripts can look for them."""
    if labels:
        console.print(f"[bold yellow]{' | '.join(labels)}[/]", soft_wrap=True)


def show_figures(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def folder_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Backend, filesystem and link, out of `folder_facts`."""
    refused = "; ".join(f"{name} refused: {why}" for name, why in facts["refused"].items())
    link = facts["link_gb_per_s"]
    return [
        ("backend", f"{facts['backend']}" + (f" ({refused})" if refused else "")),
        ("filesystem", f"{facts['filesystem']} on {facts['device'] or 'no block device'}, link "
                       + ("unknown" if link is None else f"{link:.1f} GB/s")),
        ("alignment", f"{facts['offset_alignment_nbytes']} in the file, "
                      f"{facts['memory_alignment_nbytes']} in memory"),
    ]


def session_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Ways of the bytes and memory, out of `session_facts`."""
    memory = "not registered"
    if facts["registered_nbytes"]:
        memory = f"{facts['registered_nbytes']:_} bytes registered in {facts['register_s']:.3f} s"
    bounced = "" if facts["aligned"] else f", {facts['bounced_nbytes']:_} bytes were copied: " \
        "not aligned"
    rows = [
        ("bytes", f"{facts['direct_nbytes']:_} direct, {facts['buffered_nbytes']:_} buffered"),
        ("memory", memory + bounced),
    ]
    if facts["gpudirect_nbytes"] or facts["device_bounced_nbytes"]:
        why = f" ({facts['gds_refusal']})" if facts["gds_refusal"] else ""
        rows.append(("GPU", f"{facts['gpudirect_nbytes']:_} bytes by cuFile, "
                            f"{facts['device_bounced_nbytes']:_} through host memory{why}"))
    return rows


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")
