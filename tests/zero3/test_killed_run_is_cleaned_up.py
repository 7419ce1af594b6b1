"""kill -9 in the middle of a step: the next start removes that run's folder and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.launch import start_module

SIZE = ["--dim", "64", "--layers", "2", "--heads", "2", "--sequence-length", "16"]
TIMEOUT_S = 120


def start(folder: Path, nvme_path: Path, steps: int) -> BaseProcess:
    folder.mkdir()
    return start_module("nvmeswap.examples.train_lm", *SIZE, "--steps", str(steps),
                        "--nvme-path", str(nvme_path), folder=folder)


def wait(process: BaseProcess, until: Callable[[], bool]) -> None:
    """Until it has come so far. It must be alive then."""
    deadline = time.monotonic() + TIMEOUT_S
    while not until():
        assert process.is_alive(), f"ended: {process.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.is_alive()


def wait_for_step(folder: Path, process: BaseProcess, number: int) -> None:
    output = folder / "stdout"
    wait(process, lambda: output.exists() and f"from nvme {number}/" in output.read_text())


def wait_for_writes(process: BaseProcess, path: Path, count: int) -> None:
    for _ in range(count):
        before = path.stat().st_mtime_ns
        wait(process, lambda before=before: path.stat().st_mtime_ns != before)


def run_folders(nvme_path: Path) -> set[Path]:
    return {owner.parent.parent for owner in nvme_path.rglob("owner.json")}


def test_start_after_a_kill_removes_the_dead_run_and_leaves_the_live_one(tmp_path: Path) -> None:
    """Killed jobs must not fill the drive, and a neighbour's files must stay.
    field cases K07, K08, F02"""
    nvme_path = tmp_path / "nvme"
    nvme_path.mkdir()
    (nvme_path / "mine").write_text("foreign")
    live = start(tmp_path / "live", nvme_path, 5000)
    try:
        wait_for_step(tmp_path / "live", live, 2)
        (live_folder,) = run_folders(nvme_path)
        dead = start(tmp_path / "dead", nvme_path, 5000)
        wait_for_step(tmp_path / "dead", dead, 3)
        dead.kill()
        dead.join()
        (dead_folder,) = run_folders(nvme_path) - {live_folder}
        assert list(dead_folder.rglob("*.swp"))

        again = start(tmp_path / "again", nvme_path, 3)
        again.join(TIMEOUT_S)
        assert again.exitcode == 0
        assert "from nvme 3/3" in (tmp_path / "again" / "stdout").read_text()
        assert not dead_folder.exists()
        assert run_folders(nvme_path) == {live_folder}
        for name in ("params.swp", "optimizer.swp"):  # it goes on with its own files
            (path,) = live_folder.rglob(name)
            wait_for_writes(live, path, 10)
    finally:
        live.kill()
        live.join()
    assert (nvme_path / "mine").read_text() == "foreign"
