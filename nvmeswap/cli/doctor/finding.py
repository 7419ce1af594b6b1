"""One line of the report."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Status(enum.Enum):
    """OK: nothing to do. WARN: it works, but slower, or not for large runs. FAIL: it does not."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name`: what was looked at; `what`: what was found, in a sentence; `fix`: the one thing to
    do, unless all is well; `facts`: the same as numbers, for programs."""

    name: str
    status: Status
    what: str
    fix: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def ok(name: str, what: str, **facts: Any) -> Finding:
    return Finding(name, Status.OK, what, None, facts)


def warn(name: str, what: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, Status.WARN, what, fix, facts)


def fail(name: str, what: str, fix: str, **facts: Any) -> Finding:
    return Finding(name, Status.FAIL, what, fix, facts)
