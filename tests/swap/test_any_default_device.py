"""Users set a default device, and DeepSpeed's zero.Init does while a model is built: what is ours
must lie in host memory all the same."""

from __future__ import annotations

from pathlib import Path

import torch

from nvmeswap import SwappedOptimizer, TensorSwapper
from nvmeswap.deepspeed import aio_handle


def test_swappers_work_below_another_default_device(tmp_path: Path) -> None:
    values = torch.randn(100_001)
    with torch.device("meta"), TensorSwapper(tmp_path) as swapper:
        swapper.swap_out_many({"a": values, "b": values[::3]})
        back = swapper.swap_in_many(["a", "b"])
    assert torch.equal(back["a"], values) and torch.equal(back["b"], values[::3])


def test_optimizer_works_below_another_default_device(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.randn(70_000)) for _ in range(2)]
    twins = [torch.nn.Parameter(each.detach().clone()) for each in weights]
    plain = torch.optim.AdamW(twins, lr=0.1, fused=True)
    with torch.device("meta"):
        swapped = SwappedOptimizer(
            torch.optim.AdamW, weights, lr=0.1, nvme_path=tmp_path, sub_group_size=50_000
        )
    for _ in range(3):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad, twin.grad = weight.detach().sin(), twin.detach().sin()
        with torch.device("meta"):
            swapped.step()
        plain.step()
    assert all(map(torch.equal, weights, twins))
    swapped.close()


def test_deepspeeds_handle_works_below_another_default_device(tmp_path: Path) -> None:
    values, back = torch.randn(1001), torch.zeros(1001)
    with torch.device("meta"):
        handle = aio_handle()
        assert handle.sync_pwrite(values, tmp_path / "file") == 1
        assert handle.sync_pread(back, tmp_path / "file") == 1
        assert handle.sync_pwrite(values[::2], tmp_path / "file") == 1
    assert torch.equal(back, values)
