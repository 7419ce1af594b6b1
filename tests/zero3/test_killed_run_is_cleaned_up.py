"""kill -9 in the middle of a step: the next start removes that run's folder and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LAUNCH = [sys.executable, "-u", "-m", "nvmeswap.examples.train_lm"]
SIZE = ["--dim", "64", "--layers", "2", "--heads", "2", "--sequence-length", "16"]


def start(nvme_path: Path, steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAUNCH, *SIZE, "--steps", str(steps), "--nvme-path", str(nvme_path)],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"from nvme {number}/"):
            return
    raise AssertionError(f"ended before step {number}: {process.wait()}")


def run_folders(nvme_path: Path) -> set[Path]:
    return {owner.parent.parent for owner in nvme_path.rglob("owner.json")}


def test_start_after_a_kill_removes_the_dead_run_and_leaves_the_live_one(tmp_path: Path) -> None:
    """Killed jobs must not fill the drive, and a neighbour's files must stay.
    field cases K07, K08, F02"""
    (tmp_path / "mine").write_text("foreign")
    live = start(tmp_path, 5000)
    try:
        wait_for_step(live, 2)
        (live_folder,) = run_folders(tmp_path)
        dead = start(tmp_path, 10_000)
        wait_for_step(dead, 3)
        dead.kill()
        dead.wait()
        (dead_folder,) = run_folders(tmp_path) - {live_folder}
        assert list(dead_folder.rglob("*.swp"))

        again = start(tmp_path, 3)
        wait_for_step(again, 3)
        again.communicate()
        assert again.returncode == 0
        assert not dead_folder.exists()
        assert run_folders(tmp_path) == {live_folder}
        assert list(live_folder.rglob("optimizer.swp"))
        wait_for_step(live, 500)  # it goes on with its own files
    finally:
        live.kill()
        live.wait()
    assert (tmp_path / "mine").read_text() == "foreign"
