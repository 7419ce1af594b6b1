"""`tools/gpu-check` keeps what it has found, whatever happens to its steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "gpu-check"


def gpu_check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), "--path", str(folder), "--device", "cpu", *options],
        capture_output=True, text=True,
    )


def test_steps_without_time_are_skipped_and_say_so(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = gpu_check(tmp_path, "--seconds", "1", "--json", str(found))
    assert done.returncode == 0, done.stderr
    runs = json.loads(found.read_text())["runs"]
    assert {run["step"] for run in runs} >= {"machine", "tests", "bounce", "gds", "zero3", "large"}
    assert {(run["status"], run["reason"]) for run in runs} == {("skipped", "no time left")}
    assert list(tmp_path.iterdir()) == [found]


def test_step_of_another_name_is_refused(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--steps", "bounce,boing")
    assert done.returncode == 2
    assert "boing is none of machine, tests" in done.stderr


SCRIPTS = {
    "good": "",
    "fails": "raise ValueError('no such drive')",
    "skips": """print('{"kind": "skip", "reason": "no GPU"}', flush=True)""",
    "hangs": "subprocess.Popen(['sleep', '600']); time.sleep(600)",
    "breaks_off": "print('{\"kind\": \"fig', end='', flush=True); os._exit(3)",
}
FIGURE = {"kind": "figure", "name": "speed", "value": 2.0, "target": 1.0, "passed": True}


def test_what_a_step_has_found_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tells a figure and leaves a file; then it ends well, badly, or not at all."""
    monkeypatch.syspath_prepend(str(TOOL.parents[1] / "bench"))
    from gpu_steps import Check, Step, run_all

    monkeypatch.setattr("gpu_steps.LEAST_S", 0.0)
    (tmp_path / "bench").mkdir()
    (tmp_path / "drive").mkdir()
    for name, end in SCRIPTS.items():
        (tmp_path / "bench" / f"gpu_{name}.py").write_text(
            "import os, subprocess, sys, time\n"
            "open(os.path.join(sys.argv[2], 'left'), 'w').close()\n"
            f"print('{json.dumps(FIGURE)}', flush=True)\n{end}\n"
        )
    check = Check(tmp_path / "found.json", time.monotonic() + 300)
    steps = [
        Step(name, 3 if name == "hangs" else 60, measures=name != "hangs") for name in SCRIPTS
    ]
    run_all(check, steps, tmp_path, tmp_path / "drive", "cpu")
    runs = {run["step"]: run for run in json.loads((tmp_path / "found.json").read_text())["runs"]}
    assert {name: run["status"] for name, run in runs.items()} == {
        "good": "done", "fails": "failed", "skips": "skipped", "hangs": "stopped",
        "breaks_off": "failed",
    }
    assert all([figure["name"] for figure in run["figures"]] == ["speed"] for run in runs.values())
    assert "no such drive" in runs["fails"]["reason"]
    assert runs["skips"]["reason"] == "no GPU"
    assert list((tmp_path / "drive").iterdir()) == []
