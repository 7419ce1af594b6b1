"""kill -9 of one of two ranks, wherever it is: the next start removes what it left, goes on from
the last complete checkpoint, and has the losses of a run that nobody disturbed, bit for bit.

NVMESWAP_KILLS=20 kills twenty times in a row, NVMESWAP_KILL_SEED=7 elsewhere.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import nvmeswap.zero3
from tests.launch import listen, start
from tests.zero3.killed_rank import PHASES, Kill, run

KILLS = int(os.environ.get("NVMESWAP_KILLS", "2"))
SEED = int(os.environ.get("NVMESWAP_KILL_SEED", "0"))
ONLY_RANK_0 = ("before rename", "after")
RUN_TIMEOUT_S = 120


def launch(folder: Path, steps: int, kill: Kill | None = None, victim: int = 0) -> None:
    """Two ranks to their end, as torchrun's agent has it: who is left after a death is killed.
    The victim must have killed itself."""
    store = listen(2)
    ranks = [
        start(run, rank, 2, store.port, folder, steps, kill if rank == victim else None)
        for rank in range(2)
    ]
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while any(each.is_alive() for each in ranks) and time.monotonic() < deadline:
        if any(each.exitcode not in (None, 0) for each in ranks):
            break
        time.sleep(0.05)
    for each in ranks:
        if any(other.exitcode != 0 for other in ranks):
            each.kill()
    for each in ranks:
        each.join()
    errors = [path.read_text() for path in folder.glob("error.*")]
    if kill is None:
        assert [each.exitcode for each in ranks] == [0, 0], errors
    else:
        assert ranks[victim].exitcode == -signal.SIGKILL, (kill, victim, errors)


def losses(folder: Path, rank: int) -> dict[int, float]:
    """By step; of a step that was made again, the last."""
    lines = (folder / f"losses.{rank}").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def last_saved(folder: Path) -> int:
    path = nvmeswap.zero3.latest(folder / "checkpoints")
    return 0 if path is None else json.loads((path / "complete.json").read_text())["step"]


def test_killed_anywhere_it_goes_on_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """field cases F02, F03, K07"""
    order = random.Random(SEED)
    phases: list[str] = []
    while len(phases) < KILLS:
        phases += order.sample(PHASES, len(PHASES))
    folder = tmp_path / "killed"
    folder.mkdir()
    for phase in phases[:KILLS]:
        victim = 0 if phase in ONLY_RANK_0 else order.randrange(2)
        kill = phase, order.randrange(1, 3), order.randrange(100)
        before = last_saved(folder)
        launch(folder, 4, kill, victim)
        assert int((folder / "resumed.0").read_text()) == before, kill
        assert last_saved(folder) > before, kill
        print(f"killed rank {victim} at {kill}: resumed from {before}, last {last_saved(folder)}")
    before = last_saved(folder)
    launch(folder, 2)
    assert [int((folder / f"resumed.{rank}").read_text()) for rank in range(2)] == [before] * 2
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {".lock", f"step-{before + 1:08}", f"step-{before + 2:08}"}
    assert not list((folder / "nvme").rglob("*.swp"))

    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    launch(undisturbed, before + 2)
    for rank in range(2):
        assert losses(folder, rank) == losses(undisturbed, rank)
