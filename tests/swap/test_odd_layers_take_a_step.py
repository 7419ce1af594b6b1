"""Layers whose sizes fit no block: buffers are sized from what is padded, and the step is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvmeswap import SwappedAdamW
from tests.swap.conftest import set_gradients


@pytest.mark.parametrize("sub_group_size", (4_194_304, 100_000, 4096))
def test_layer_of_512_by_1000_takes_its_steps(tmp_path: Path, sub_group_size: int) -> None:
    """Buffers from unpadded, tensors from padded sizes: an assert at the start.  field case A03

    513_000 elements with the bias; 513_024 padded there.
    """
    torch.manual_seed(0)
    swapped, resident = torch.nn.Linear(512, 1000), torch.nn.Linear(512, 1000)
    resident.load_state_dict(swapped.state_dict())
    optimizer = SwappedAdamW(swapped.parameters(), nvme_path=tmp_path, pin_memory=False,
                             sub_group_size=sub_group_size)
    expected = torch.optim.AdamW(resident.parameters(), fused=True)
    try:
        for step in range(3):
            for layer, each in ((swapped, optimizer), (resident, expected)):
                set_gradients(layer.parameters(), step)
                each.step()
        assert sum(parameter.numel() for parameter in swapped.parameters()) == 513_000
        for ours, theirs in zip(swapped.parameters(), resident.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        optimizer.close()
