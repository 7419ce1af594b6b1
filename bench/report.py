"""Rounds, medians, figures, JSON: how every script here measures and tells.

Speed drifts on any machine, and by more than what is to be seen. So variants run in turns, the
turns rotate, each round gives one ratio, and the median of these is the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvmeswap.cli.bench.usage import Usage

Samples = Mapping[str, Usage]
"""What one turn of a variant measured, by name ("read", "write")."""
Value = Callable[[Usage], float]


def speed(usage: Usage) -> float:
    return usage.gb_per_s


def cpu(usage: Usage) -> float:
    return usage.cpu_s_per_gb


def wall(usage: Usage) -> float:
    return usage.wall_s


@dataclass(frozen=True)
class Rounds:
    """`samples[variant][name]`: one a round."""

    samples: dict[str, dict[str, list[Usage]]]

    def values(self, variant: str, name: str, value: Value = speed) -> list[float]:
        return [value(usage) for usage in self.samples[variant][name]]

    def median(self, variant: str, name: str, value: Value = speed) -> float:
        return statistics.median(self.values(variant, name, value))

    def ratio(self, variant: str, over: str, name: str, value: Value = speed) -> float:
        """The median over all rounds of `variant` over `over` in that round."""
        return self.ratio_of((variant, name), (over, name), value)

    def ratio_of(self, one: tuple[str, str], other: tuple[str, str], value: Value = speed) -> float:
        """The same for any two (variant, name)."""
        pairs = zip(self.values(*one, value), self.values(*other, value), strict=True)
        return statistics.median(upper / lower for upper, lower in pairs)


@dataclass
class Report:
    """What a script found. `progress` goes to stderr, figures to stdout and the JSON."""

    round_count: int
    figures: dict[str, float] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rounds(self, section: str, variants: Mapping[str, Callable[[], Samples]]) -> Rounds:
        """Run all variants in turns, in every round another one first."""
        names = list(variants)
        found: dict[str, dict[str, list[Usage]]] = {name: {} for name in names}
        begin_s = time.monotonic()
        for number in range(self.round_count):
            for index in range(len(names)):
                variant = names[(index + number) % len(names)]
                for name, usage in variants[variant]().items():
                    found[variant].setdefault(name, []).append(usage)
                    self.runs.append({"section": section, "variant": variant, "name": name,
                                      "round": number, **dataclasses.asdict(usage)})
        print(f"{section}: {self.round_count} rounds, {time.monotonic() - begin_s:.1f} s",
              file=sys.stderr)
        return Rounds(found)

    def figure(self, name: str, value: float) -> None:
        self.figures[name] = value
        print(f"{name:45} {value:12.3f}", flush=True)

    def note(self, text: str) -> None:
        """Something that limits what the figures say."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"note: {text}", flush=True)

    def write(self, path: Path | None, machine: Mapping[str, Any]) -> None:
        if path is not None:
            content = {"figures": self.figures, "runs": self.runs, "notes": self.notes,
                       "machine": machine}
            path.write_text(json.dumps(content, indent=1) + "\n")


def parser(description: str, sections: Sequence[str] = ()) -> argparse.ArgumentParser:
    """With the arguments that all scripts have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--path", type=Path, required=True, metavar="DIR",
                      help="an existing folder on the drive")
    made.add_argument("--quick", action="store_true", help="under a minute: smaller, 3 rounds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures, runs and machine")
    if sections:
        made.add_argument("--only", nargs="+", choices=sections, default=list(sections),
                          help="some sections")
    return made
