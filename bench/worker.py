"""A process that measures on request: one line of JSON in, one line out.

What a process holds in memory is only known of a process of its own; and what DeepSpeed does to a
process that it fails in is not to happen to ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class WorkerFailed(Exception):
    """The process ended, or did not answer; says what it last wrote to stderr."""


class Worker:
    """A script beside this file, run by `python`. It answers once when it is ready, then once to
    each request; between requests it uses no processor."""

    def __init__(
        self, python: str, script: str, *, environment: Mapping[str, str] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script))], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises WorkerFailed when there is no answer; the process is of no use afterwards."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            self._process.kill()
            raise WorkerFailed(f"no answer within {self._timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return last_words(self._errors.read()) or f"status {self._process.returncode}"

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def last_words(errors: str) -> str:
    """The last exception in what a process wrote to stderr, and where it was raised, since an
    assertion mostly says nothing. Without one, the last line."""
    lines = [line for line in errors.split("\n") if line.strip()]
    # What follows an exception are messages of exit handlers.
    for number in range(len(lines) - 1, 0, -1):
        if re.match(r"(\[rank0\]: )?\w*(Error|Exception)\b", lines[number]):
            for at in range(number - 1, -1, -1):
                frame = re.search(r'File ".*?([^/"]+)", line (\d+), in (\w+)', lines[at])
                if frame:
                    file, line, function = frame.groups()
                    said = lines[number].removeprefix("[rank0]: ").strip()
                    statement = lines[at + 1].removeprefix("[rank0]: ").strip()
                    return f"{said}, in {function} ({file}:{line}): {statement}"
    return lines[-1].strip() if lines else ""
