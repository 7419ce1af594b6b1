"""How a job's ranks come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_repeatable() -> None:
    """A GPU's sums get one order, without which two equal runs may differ, with or without
    nvmeswap. To be called before anything is computed there."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def ranks(device: str, backend: str, *, repeatable: bool) -> Iterator[DeviceMesh]:
    """The mesh of all ranks: torchrun's, or this process alone. `repeatable`: as `make_repeatable`
    says."""
    if device == "cuda":
        backend = f"cpu:gloo,cuda:{backend}"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if repeatable:
            make_repeatable()
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down: gloo's threads sometimes abort it then
    ("terminate called without an active exception", torch 2.13, with or without nvmeswap), which
    would turn a good run into a failed one. Nothing is left open: `ranks` closed it all.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
