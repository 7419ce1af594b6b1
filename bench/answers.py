"""The other side of `worker.Worker`: what every worker process does. Imports nothing of ours, since
DeepSpeed's interpreter may not have it."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer_requests(begin: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """Runs `begin`, which imports what takes long, and answers each request by what it returned,
    called with the request's fields. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = begin()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


def memory_nbytes() -> dict[str, int]:
    """`peak_nbytes` since the start or the last `forget_peak`, `resident_nbytes` now."""
    status = Path("/proc/self/status").read_text()
    return {
        name: int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
        for name, field in (("peak_nbytes", "VmHWM"), ("resident_nbytes", "VmRSS"))
    }


def forget_peak() -> None:
    """Have the peak count anew, from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def device_nbytes() -> dict[str, int]:
    """Bytes that this process has had moved from and to drives: direct I/O, or after the cache."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read_nbytes": int(found["read_bytes"]), "write_nbytes": int(found["write_bytes"])}


class Taken:
    """What some work took, by the clock and of the processors, and moved."""

    def __init__(self) -> None:
        self._moved = device_nbytes()
        self._cpu_s = cpu_s()
        self._begin_s = time.perf_counter()

    def so_far(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self._begin_s
        moved = {name: value - self._moved[name] for name, value in device_nbytes().items()}
        return {"wall_s": wall_s, "cpu_s": cpu_s() - self._cpu_s, **moved}


def cpu_s() -> float:
    """Of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
