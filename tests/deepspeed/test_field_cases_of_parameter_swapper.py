"""What DeepSpeed's users met, with our parameter swapper driven as DeepSpeed drives its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from nvmeswap.errors import SwapConfigError, SwapUsageError
from tests.deepspeed.partitions import MIB, DrivenSwapper, Parameter

START = """
import os, sys, time, torch
from pathlib import Path
from tests.deepspeed.partitions import DrivenSwapper
driven = DrivenSwapper(Path(sys.argv[1]))
parameters = [driven.partition(ds_id, 300_001) for ds_id in range(8)]
"""


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", START + script, str(folder)], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment)


def test_partition_of_another_size_is_refused(tmp_path: Path) -> None:
    """As of another dtype or number of ranks: DeepSpeed aborts at "buffer nbytes != file bytes".

    field case A04"""
    driven = DrivenSwapper(tmp_path)
    driven.partition(0, 524_288)
    with pytest.raises(SwapUsageError, match="524_288"):
        driven.swapper.get_buffer(Parameter(0, 262_144, torch.float32), 262_144)
    driven.swapper.close()


def test_closed_swappers_keep_neither_memory_nor_files(tmp_path: Path) -> None:
    """field case B11"""
    resident = []
    for _ in range(20):
        driven = DrivenSwapper(tmp_path)
        parameters = [driven.partition(ds_id, MIB) for ds_id in range(3)]
        driven.gather(parameters)
        driven.release(parameters)
        del parameters
        driven.swapper.close()
        assert list(tmp_path.rglob("*.swp")) == []
        resident.append(psutil.Process().memory_info().rss)
    assert resident[-1] - resident[4] < 6 * MIB


def test_exception_with_writes_under_way_ends_the_process_as_usual(tmp_path: Path) -> None:
    """DeepSpeed aborts when its handle is dropped, and hides the exception.  field case H01"""
    process = start("driven.update(parameters)\nraise ValueError('the user is told this')", tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert errors.endswith("ValueError: the user is told this\n")
    assert list(tmp_path.rglob("*.swp")) == []


def test_folder_of_a_killed_job_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    """In DeepSpeed both jobs use the same names: the later removes the other's, or none are.

    field cases F02, K07"""
    wait = "driven.swapper.synchronize_writes(); print('ready', flush=True); sys.stdin.read()"
    dead, living = start(wait, tmp_path), start(
        wait + "\ndriven.forget_copies(); driven.gather(parameters)\n"
        "print(all(each.is_right for each in parameters), flush=True)", tmp_path)
    for process in (dead, living):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(list(tmp_path.rglob("params.swp"))) == 2
    dead.send_signal(signal.SIGKILL)
    dead.wait(60)
    driven = DrivenSwapper(tmp_path)
    parameter = driven.partition(0, 300_001)
    assert len(list(tmp_path.rglob("params.swp"))) == 2
    living_output, errors = living.communicate("", timeout=60)
    assert living_output == "True\n", errors
    driven.forget_copies()
    driven.gather([parameter])
    assert parameter.is_right
    driven.swapper.close()
    assert list(tmp_path.rglob("*.swp")) == []


def test_gpu_direct_storage_is_refused_by_its_name(tmp_path: Path) -> None:
    """field case G04"""
    with pytest.raises(SwapConfigError) as raised:
        DrivenSwapper(tmp_path, use_gds=True)
    assert raised.value.key == "aio.use_gds" and raised.value.fix
