"""A process group of one rank for tests that run in this process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def one_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
