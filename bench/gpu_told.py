"""How the steps of tools/gpu-check measure and tell: rounds in turns until the time is up, and one
line of JSON for each finding, at once, so that nothing is lost when a step is stopped."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from report import Rounds, Samples

from nvmeswap.cli.bench.usage import Usage

_told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is for the log


@dataclass(frozen=True)
class Options:
    """What each step is told: a folder of its own, "cuda" or "cpu" (a rehearsal of tiny sizes), and
    the seconds after which it is stopped."""

    folder: Path
    device: str
    seconds: float
    began_s: float

    @property
    def rehearses(self) -> bool:
        return self.device == "cpu"

    @property
    def left_s(self) -> float:
        return self.began_s + self.seconds - time.monotonic()

    def size(self, on_gpu: int, tiny: int) -> int:
        return tiny if self.rehearses else on_gpu


def options(description: str | None) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    return Options(given.folder, given.device, given.seconds, time.monotonic())


def figure(
    name: str,
    value: float,
    *,
    ours: float | None = None,
    peer: float | None = None,
    unit: str = "",
    of: str = "",
    target: float | None = None,
    at_most: bool = False,
) -> None:
    """`value` is what is compared with the target, mostly a median of ratios; `ours` and `peer`,
    of the system `of`, are the medians of the two sides in `unit`."""
    passed = None
    if target is not None:
        passed = value <= target if at_most else value >= target
    _tell("figure", name=name, value=value, ours=ours, peer=peer, unit=unit, of=of, target=target,
          at_most=at_most, passed=passed)


def detail(name: str, value: Any) -> None:
    """What is worth keeping in the JSON, but not a row of the table."""
    _tell("detail", name=name, value=value)


def note(text: str) -> None:
    """Something that limits what the figures say."""
    _tell("note", text=text)


def skip(reason: str) -> NoReturn:
    _tell("skip", reason=reason)
    raise SystemExit(0)


def _tell(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, **fields}), file=_told, flush=True)


def rounds(
    variants: Mapping[str, Callable[[], Samples]], seconds: float, *, least: int = 3, most: int = 9
) -> Rounds:
    """All variants in turns, in every round another one first, as often as `seconds` allow."""
    names = list(variants)
    found: dict[str, dict[str, list[Usage]]] = {name: {} for name in names}
    began_s, count, longest_s = time.monotonic(), 0, 0.0
    while count < most:
        round_s = time.monotonic()
        if count >= least and round_s + longest_s > began_s + seconds:
            break
        for index in range(len(names)):
            variant = names[(index + count) % len(names)]
            for name, usage in variants[variant]().items():
                found[variant].setdefault(name, []).append(usage)
        count += 1
        longest_s = max(longest_s, time.monotonic() - round_s)
    return Rounds(found)


def compare(
    prefix: str, found: Rounds, one: str, over: str, way: str, *, target: float | None
) -> None:
    """The figure `{prefix}_{way}_over_{over}`: GB/s of `one` over those of `over`, by round, and
    all rounds as a detail."""
    figure(f"{prefix}_{way}_over_{over}", found.ratio(one, over, way), ours=found.median(one, way),
           peer=found.median(over, way), unit="GB/s", of=over, target=target)
    for each in (one, over):
        detail(f"{prefix}_{way}_gb_per_s_{each}", found.values(each, way))
