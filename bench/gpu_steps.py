"""How tools/gpu-check runs its steps, and keeps what they tell. Imports nothing but Python's own
library: what fails to import is to be a step's failure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import last_words

ROOT = Path(__file__).resolve().parents[1]
_NEEDED = ("bench", "tests", "pyproject.toml")  # by the steps, beside nvmeswap itself
_GRACE_S = 10.0  # between asking a step to end and ending it
_RANKS_GRACE_S = 3.0  # for torchrun, when its parent has ended already
LEAST_S = 10.0  # a step with less is not begun
_KEPT_CHARACTERS = 4000  # of what a step that failed has printed


@dataclass(frozen=True)
class Step:
    """Those without measurements run first, at the same time."""

    name: str
    limit_s: float
    measures: bool = True


@dataclass
class Check:
    """All that was found so far, and where it goes."""

    file: Path | None
    deadline_s: float
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def begin(self, name: str) -> dict[str, Any]:
        with self.lock:
            self.steps[name] = {"status": "running", "reason": "", "seconds": 0.0, "figures": [],
                                "details": {}, "notes": []}
            return self.steps[name]

    def take(self, name: str, line: str) -> None:
        """A line that a step has told."""
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # the end of a step that was killed
            return
        step = self.steps[name]
        with self.lock:
            match told.pop("kind"):
                case "figure":
                    step["figures"].append(told)
                case "detail":
                    step["details"][told["name"]] = told["value"]
                case "note":
                    self.note(f"{name}: {told['text']}")
                    step["notes"].append(told["text"])
                case "skip":
                    step.update(status="skipped", reason=told["reason"])
            self.write()

    def note(self, text: str) -> None:
        with self.lock:
            self.notes.append(text)

    def write(self) -> None:
        """Whole, or what was there before."""
        if self.file is None:
            return
        with self.lock:
            figures = {each["name"]: each["value"]
                       for step in self.steps.values() for each in step["figures"]}
            runs = [{"step": name, **step} for name, step in self.steps.items()]
            machine = self.steps.get("machine", {}).get("details", {})
            content = {"figures": figures, "runs": runs, "notes": self.notes, "machine": machine}
            new = self.file.with_name(f".{self.file.name}.new")
            new.write_text(json.dumps(content, indent=1) + "\n")
            new.replace(self.file)

    def end_all(self) -> None:
        """Steps that still run, because this process is told to end."""
        with self.lock:
            for step in self.steps.values():
                if step["status"] == "running":
                    step.update(status="stopped", reason="gpu-check was ended")
            for group in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)


def _run_step(check: Check, step: Step, home: Path, folder: Path, device: str) -> None:
    """To its end or its limit; its files are removed whatever happened."""
    found = check.begin(step.name)
    limit_s = min(step.limit_s, check.deadline_s - time.monotonic() - _GRACE_S)
    if limit_s < LEAST_S:
        found.update(status="skipped", reason="no time left")
        check.write()
        return
    own = folder / step.name
    own.mkdir()
    began_s = time.monotonic()
    print(f"{step.name}: at most {limit_s:.0f} s", file=sys.stderr)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(home / "bench" / f"gpu_{step.name}.py"), "--folder", str(own),
             "--device", device, "--seconds", f"{limit_s:.0f}"],
            cwd=home, env=_environment(home), stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )
        with check.lock:
            check.running.add(process.pid)
        stopped = threading.Event()
        watch = threading.Timer(limit_s, _stop, (process, stopped))
        watch.daemon = True
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            check.take(step.name, line)
        status = process.wait()
        watch.cancel()
        _stop_group(process.pid)
        with check.lock:
            check.running.discard(process.pid)
        errors.seek(0)
        said = errors.read()
    shutil.rmtree(own, ignore_errors=True)
    found["seconds"] = time.monotonic() - began_s
    if found["status"] == "stopped":
        pass  # with all of them
    elif stopped.is_set():
        found.update(status="stopped", reason=f"its {limit_s:.0f} s were over")
    elif status:
        found.update(status="failed", reason=last_words(said) or f"status {status}")
    elif found["status"] == "running":
        found["status"] = "done"
    if found["status"] in ("stopped", "failed"):
        found["details"]["printed"] = said[-_KEPT_CHARACTERS:]
    check.write()
    print(f"{step.name}: {found['status']} after {found['seconds']:.0f} s", file=sys.stderr)


def _stop(process: subprocess.Popen[str], stopped: threading.Event) -> None:
    """Asks first: torchrun's ranks are in groups of their own, and it ends them if it may."""
    stopped.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    time.sleep(_RANKS_GRACE_S)
    _stop_group(process.pid)


def _stop_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def home_of_steps() -> Iterator[Path]:
    """This clone if nvmeswap is built in it, else a copy of what the steps need without it, so that
    the installed one is found."""
    if (ROOT / "nvmeswap" / "_native.abi3.so").exists():
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        for each in _NEEDED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, Path(name) / each)
        yield Path(name)


def run_all(check: Check, chosen: Sequence[Step], home: Path, parent: Path, device: str) -> None:
    """All steps, by the scripts in `home`; their files go to a folder in `parent`."""
    with tempfile.TemporaryDirectory(
        prefix="gpu-check-", dir=parent, ignore_cleanup_errors=True
    ) as name, ThreadPoolExecutor(len(chosen)) as pool:
        try:
            for each in [pool.submit(_run_step, check, step, home, Path(name), device)
                         for step in chosen if not step.measures]:
                each.result()
            for step in chosen:
                if step.measures:
                    _run_step(check, step, home, Path(name), device)
        finally:  # before the pool waits for its threads
            check.end_all()
