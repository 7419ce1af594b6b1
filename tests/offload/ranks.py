"""Managed models on several ranks; started by torchrun as tests/zero3/ranks.py says."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nvmeswap import OffloadManager, SwapError
from tests.offload.runs import input_of, stack
from tests.zero3 import ranks


def trained_in_parallel(nvme_path: Path, tier: str, order: str) -> dict[str, torch.Tensor] | str:
    """Each rank learns from its own input; the weights afterwards, or why it was refused."""
    model = stack()
    options = {"path": nvme_path} if tier == "nvme" else {}
    try:
        if order == "manager first":
            OffloadManager(model, "cpu", tier=tier, trainable=tier, **options)
            parallel = DistributedDataParallel(model)
        else:
            parallel = DistributedDataParallel(model)
            OffloadManager(parallel, "cpu", tier=tier, trainable=tier, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            parallel(input_of(10 * step + dist.get_rank())).square().mean().backward()
            optimizer.step()
    except SwapError as error:
        assert error.fix
        return str(error)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def all_ways(nvme_path: Path) -> dict[str, dict[str, torch.Tensor] | str]:
    return {
        f"{tier}, {order}": trained_in_parallel(nvme_path, tier, order)
        for tier in ("cpu", "nvme") for order in ("manager first", "manager last")
    }


ranks.FUNCTIONS["all_ways"] = all_ways

if __name__ == "__main__":
    ranks.main()
