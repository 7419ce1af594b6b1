"""Runs a script on some ranks: each rank a process of its own, forked from one that has imported
DeepSpeed already (that alone takes seconds)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.deepspeed.cases import Case
from tests.oracle import Run

RANK_TIMEOUT_S = 120
# DeepSpeed imports its Muon with the first engine, and so all of torch's compiler.
PRELOADED = ["tests.deepspeed.programs", "nvmeswap.deepspeed",
             "deepspeed.runtime.zero.muon.muon_optimizer"]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


def environment() -> dict[str, str]:
    """Of processes that run scripts."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
    }


def run_ranks(case: Case, ranks: int, folder: Path, nvme_path: Path | None) -> list[Run]:
    """The case's script in `folder`, by rank: on `nvme_path` with nvmeswap installed, or with
    DeepSpeed's CPU offload. Fails with the ranks' tracebacks."""
    (folder / "rendezvous").unlink(missing_ok=True)
    started = []
    with patch.dict(os.environ, environment()):  # counts when the first one is started
        for rank in range(ranks):
            process = _server.Process(target=rank_main, args=(case, rank, ranks, folder, nvme_path))
            process.start()
            started.append(process)
    results, failures = [], ""
    for rank, process in enumerate(started):
        failure, result = _result(process, folder / f"result{rank}")
        failures += f"rank {rank}: {failure}\n" if failure else ""
        results.append(result)
    assert not failures, f"{case.script}: {failures}"
    return results


def _result(process: BaseProcess, path: Path) -> tuple[str | None, Any]:
    process.join(RANK_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
        return f"not ready after {RANK_TIMEOUT_S} s", None
    if not path.exists():
        return f"ended with {process.exitcode}", None
    result: tuple[str | None, Any] = pickle.loads(path.read_bytes())
    path.unlink()
    return result


def rank_main(
    case: Case, rank: int, ranks: int, folder: Path, nvme_path: Path | None
) -> None:
    """What a rank's process runs."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import nvmeswap.deepspeed
    from tests.deepspeed import programs

    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
    # Else DeepSpeed compiles its collectives in shared memory, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = dist.FileStore(str(folder / "rendezvous"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=RANK_TIMEOUT_S / 2))
    failure, result = None, None
    try:
        if nvme_path is not None:
            nvmeswap.deepspeed.install()
        result = getattr(programs, case.script)(case.json(nvme_path), folder)
    except BaseException:
        failure = traceback.format_exc()
    (folder / f"result{rank}").write_bytes(pickle.dumps((failure, result)))
    if failure is None:
        dist.barrier()
    os._exit(0 if failure is None else 1)  # gloo's threads sometimes abort at a normal exit
