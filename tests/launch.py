"""Ranks and other processes of tests, each forked from one that has imported torch, nvmeswap and
DeepSpeed already (that alone takes seconds).

What torchrun itself does is in tests/examples and tests/deepspeed/test_scripts_run_unchanged.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

RANK_TIMEOUT_S = 120
_starting = threading.Lock()
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([
    "tests.deepspeed.programs", "nvmeswap.deepspeed",
    # DeepSpeed imports these with the first engine, and so all of torch's compiler.
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.superoffload.superoffload_stage3",
    "tests.zero3.checkpoint_ranks",
])


def environment() -> dict[str, str]:
    """Of processes that run tests' programs."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
        "TORCH_COMPILE_DISABLE": "1",  # DeepSpeed's Muon would be compiled for a minute
    }


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that runs it. Its environment is that of the first one."""
    with _starting, patch.dict(os.environ, environment()):  # threads would undo each other's
        process = _server.Process(target=function, args=arguments)
        process.start()
    return process


def run_module(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """To its end, what `start_module` starts."""
    process = start_module(name, *arguments, folder=folder)
    process.join(2 * RANK_TIMEOUT_S)
    process.kill()  # if it is still there
    process.join()
    stdout, stderr = ((folder / each).read_text() for each in ("stdout", "stderr"))
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def start_module(name: str, *arguments: str, folder: Path) -> BaseProcess:
    """As `python -m name arguments...` in `folder`, but for what the interpreter does at its end;
    its output goes to the files "stdout" and "stderr" there."""
    return start(_run_module, name, arguments, folder)


def _run_module(name: str, arguments: Sequence[str], folder: Path) -> None:
    os.chdir(folder)
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, open(stream, "w", buffering=1))  # noqa: SIM115
    torch.set_num_threads(1)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def listen(ranks: int) -> dist.TCPStore:
    """Where so many ranks meet; it is gone with the object."""
    return dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)


def be_rank(rank: int, ranks: int, port: int) -> None:
    """In the rank's process: its environment is as torchrun sets it."""
    torch.set_num_threads(1)
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    })


def run_ranks(
    ranks: int, function: Callable[..., Any], folder: Path, *arguments: Any
) -> list[Any]:
    """function(*arguments) on so many ranks of a gloo group; the results by rank, which pass
    through files in `folder`. Fails with the tracebacks of all ranks that have one."""
    store = listen(ranks)
    started = [
        start(_run_rank, rank, ranks, store.port, folder / f"result{rank}", function, arguments)
        for rank in range(ranks)
    ]
    results, failures = [], ""
    for rank, process in enumerate(started):
        failure, result = _result(process, folder / f"result{rank}")
        failures += f"rank {rank}: {failure}\n" if failure else ""
        results.append(result)
    assert not failures, failures
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


def _run_rank(
    rank: int, ranks: int, port: int, path: Path, function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    be_rank(rank, ranks, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_TIMEOUT_S / 2))
    failure, result = None, None
    try:
        result = function(*arguments)
    except BaseException:
        failure = traceback.format_exc()
    path.write_bytes(pickle.dumps((failure, result)))
    if failure is None:
        dist.barrier()
    os._exit(0 if failure is None else 1)  # gloo's threads sometimes abort at a normal exit
