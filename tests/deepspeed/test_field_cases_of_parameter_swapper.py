"""What DeepSpeed's users met, with our parameter swapper driven as DeepSpeed drives its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from nvmeswap.errors import SwapConfigError, SwapUsageError
from tests.deepspeed.partitions import MIB, DrivenSwapper, Parameter
from tests.store.test_owner_survives_kill import Child

FAILS_UNDER_WAY = """
import sys
from pathlib import Path
from tests.deepspeed.partitions import DrivenSwapper
driven = DrivenSwapper(Path(sys.argv[1]))
parameters = [driven.partition(ds_id, 300_001) for ds_id in range(8)]
driven.update(parameters)
raise ValueError('the user is told this')
"""


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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", FAILS_UNDER_WAY, str(tmp_path)],
                          capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ValueError: the user is told this\n")
    assert list(tmp_path.rglob("*.swp")) == []


def test_folder_of_a_killed_job_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    """In DeepSpeed both use the same names, and no file of either ever goes.

    field cases F02, K07"""

    def another_job() -> DrivenSwapper:
        driven = DrivenSwapper(tmp_path)
        driven.partition(0, 300_001)
        driven.swapper.synchronize_writes()
        return driven

    def killed_job() -> DrivenSwapper:
        torch.set_num_threads(1)  # the parent's others are not in the child
        return another_job()

    living = DrivenSwapper(tmp_path)
    parameters = [living.partition(ds_id, 300_001) for ds_id in range(3)]
    Child(killed_job).end(kill=True)
    assert len(list(tmp_path.rglob("params.swp"))) == 2
    after = another_job()
    assert len(list(tmp_path.rglob("params.swp"))) == 2
    living.forget_copies()
    living.gather(parameters)
    assert all(parameter.is_right for parameter in parameters)
    for driven in (living, after):
        driven.swapper.close()
    assert list(tmp_path.rglob("*.swp")) == []


def test_gpu_direct_storage_is_refused_by_its_name(tmp_path: Path) -> None:
    """field case G04"""
    with pytest.raises(SwapConfigError) as raised:
        DrivenSwapper(tmp_path, use_gds=True)
    assert raised.value.key == "aio.use_gds" and raised.value.fix
