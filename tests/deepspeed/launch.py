"""Runs a script on some ranks."""

from __future__ import annotations

from pathlib import Path

from tests import launch
from tests.deepspeed.cases import Case
from tests.oracle import Run


def run_ranks(case: Case, ranks: int, folder: Path, nvme_path: Path | None) -> list[Run]:
    """The case's script in `folder`, by rank: on `nvme_path` with nvmeswap installed, or with
    DeepSpeed's CPU offload. Fails with the ranks' tracebacks."""
    return launch.run_ranks(ranks, run_script, folder, case, folder, nvme_path)


def run_script(case: Case, folder: Path, nvme_path: Path | None) -> Run:
    """On a rank."""
    import nvmeswap.deepspeed
    from tests.deepspeed import programs

    be_quick()
    if nvme_path is not None:
        nvmeswap.deepspeed.install()
    run: Run = getattr(programs, case.script)(case.json(nvme_path), folder)
    return run


def be_quick() -> None:
    """Else DeepSpeed compiles its collectives in shared memory, for a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
