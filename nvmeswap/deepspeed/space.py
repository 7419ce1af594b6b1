"""Where a swapper's bytes go: a folder of its own below DeepSpeed's `nvme_path`, and an engine.

DeepSpeed's own paths have no name of a job in them, so two jobs destroy each other's files, and
nothing removes them. Here each swapper claims a folder that nobody else has
(`<nvme_path>/nvmeswap/<run>/rank00000`), and what dead jobs left there goes at the next start.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nvmeswap.deepspeed.files import EngineSize, engines
from nvmeswap.errors import SwapConfigError, SwapPathError
from nvmeswap.io import Engine
from nvmeswap.io.drives import probe_folders
from nvmeswap.store.store import Checksum, Store
from nvmeswap.swap.space import new_run_name

TIMEOUT_S = 60.0
# Each tensor of the optimizer is an open file; DeepSpeed opens its own for each transfer.
_DESCRIPTOR_COUNT = 1 << 16


def open_store(nvme_path: str | os.PathLike[str], aio: Mapping[str, Any]) -> tuple[Engine, Store]:
    """The engine, shared by all swappers of the process that ask for the same sizes, and a new
    store, which its owner closes. `aio`: DeepSpeed's block of that name, with its defaults.

    Raises the process's soft limit of open files as far as its hard one allows. Raises
    SwapConfigError for `use_gds`; SwapPathError. Blocks for some milliseconds."""
    if aio.get("use_gds"):
        raise SwapConfigError(
            "aio.use_gds is set", key="aio.use_gds",
            fix="leave it out, or uninstall(): GPUDirect Storage is DeepSpeed's own",
        )
    folder = Path(nvme_path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SwapPathError("nvme_path can't be made", path=folder, errno=error.errno,
                            fix="name a folder on the drive, that this user may write") from error
    _allow_descriptors()
    probe = probe_folders([folder])
    size = EngineSize.of(aio["block_size"], aio["queue_depth"], aio["intra_op_parallelism"])
    engine = engines.get(probe.backend, size)
    in_job = dist.is_available() and dist.is_initialized()
    store = Store(
        folder,
        run=f"deepspeed-{new_run_name()}",
        rank=dist.get_rank() if in_job else 0,
        world_size=dist.get_world_size() if in_job else 1,
        engine=engine,
        probe=probe,
        checksum=Checksum.ALL,
        timeout_s=TIMEOUT_S,
    )
    return engine, store


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTOR_COUNT if hard == resource.RLIM_INFINITY else min(_DESCRIPTOR_COUNT, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
