"""Training that clips and scales, swapped or in RAM, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nvmeswap.zero3
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
Loss = Callable[[nn.Module, int], torch.Tensor]


def model_of(dtype: torch.dtype = torch.float32, hidden: int = 31) -> nn.Module:
    """Uneven shards, and a bias of one element: an empty shard on every rank but the first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.GELU(), nn.Linear(hidden, 1)).to(dtype)


def square(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 20, generator=generator).to(dtype)).float().square().mean()


def config(nvme_path: Path, **outermost: Any) -> dict[str, Any]:
    adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
    swap = {"min_swap_nbytes": 0}
    usual = Case(buffer_count=1).config(nvme_path)
    return {**usual, "optimizer": adamw, "nvmeswap": swap, **outermost}


def resident(policy: MixedPrecisionPolicy | None = None, dtype: torch.dtype = torch.float32,
             mesh: Any = None, hidden: int = 31) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 and torch's AdamW: none of our parts."""
    model, policy = model_of(dtype, hidden), policy or MixedPrecisionPolicy()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*list(model)[::2], model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def scaled_run(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
               *, steps: int = 8, max_norm: float | None = None, loss_of: Loss = square) -> Run:
    """The scale and the loss of every step."""
    numbers: list[float] = []
    for step in range(steps):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            numbers.append(clip(model, optimizer, max_norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        numbers += [scaler.get_scale(), loss.item()]
    return Run(numbers, weights(model))


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float,
         norm_type: float = 2.0) -> float:
    if hasattr(optimizer, "clip_grad_norm_"):
        return float(optimizer.clip_grad_norm_(max_norm, norm_type))
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return float(norm.full_tensor())


@contextmanager
def swapped(nvme_path: Path, dtype: torch.dtype = torch.float32, mesh: Any = None,
            hidden: int = 31, **outermost: Any) -> Iterator[tuple[nn.Module, Any]]:
    source = config(nvme_path, **outermost)
    model, optimizer = nvmeswap.zero3.shard(model_of(dtype, hidden), source, mesh=mesh)
    try:
        yield model, optimizer
    finally:
        optimizer.close()


def assert_scaled_runs_equal(nvme_path: Path, *, init_scale: float = 2.0**18,
                             max_norm: float | None = None, loss_of: Loss = square) -> Run:
    """Ours against torch.amp.GradScaler in RAM; returns the run."""
    how: dict[str, Any] = {"init_scale": init_scale, "growth_interval": 3}
    with swapped(nvme_path, fp16={"enabled": True}) as (model, optimizer):
        scaler = nvmeswap.zero3.GradScaler("cpu", **how)
        ours = scaled_run(model, optimizer, scaler, max_norm=max_norm, loss_of=loss_of)
    theirs = scaled_run(*resident(FP16), torch.amp.GradScaler("cpu", **how),
                        max_norm=max_norm, loss_of=loss_of)
    assert first_difference(ours, theirs) is None, first_difference(ours, theirs)
    return ours


# --- on several ranks: tests.zero3.ranks runs these ------------------------------------------


def clips_and_scales(nvme_path: Path) -> None:
    """All that has to be agreed on between ranks."""
    for norm_type in (1.0, 2.0, 3.0):
        assert_clipped_runs_equal(nvme_path, norm_type=norm_type)
    assert_largest_gradient_is_found(nvme_path)
    assert_clipped_runs_equal(nvme_path, mesh=hybrid())
    run = assert_scaled_runs_equal(nvme_path, max_norm=0.1)
    assert run.losses[1] < 2.0**18, "nothing overflowed: a test of nothing"
    assert_one_rank_alone_has_an_infinite_gradient(nvme_path)
    assert_error_if_nonfinite_is_raised_on_all(nvme_path)


def hybrid() -> Any:
    """Two replicas, each whole on its rank."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))


def assert_clipped_runs_equal(nvme_path: Path, *, norm_type: float = 2.0,
                              mesh: Any = None) -> None:
    runs = []
    with swapped(nvme_path, mesh=mesh) as (model, optimizer):
        runs.append(_clipped_run(model, optimizer, norm_type))
    runs.append(_clipped_run(*resident(mesh=mesh), norm_type))
    assert first_difference(*runs) is None, (norm_type, mesh, first_difference(*runs))


def _clipped_run(model: nn.Module, optimizer: torch.optim.Optimizer, norm_type: float) -> Run:
    numbers = []
    for step in range(3):
        square(model, step).backward()
        numbers.append(clip(model, optimizer, 0.05, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    return Run(numbers, weights(model))


def assert_largest_gradient_is_found(nvme_path: Path) -> None:
    """The inf-norm, against a model that is not sharded: torch's own fails on empty shards."""
    plain = model_of()
    square(plain, 0).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    largest = max(float(p.grad.abs().max()) for p in plain.parameters()) / dist.get_world_size()
    with swapped(nvme_path) as (model, optimizer):
        square(model, 0).backward()
        assert clip(model, optimizer, 1.0, math.inf) == largest


def assert_one_rank_alone_has_an_infinite_gradient(nvme_path: Path) -> None:
    """The last row's gradient is infinite: on the other ranks all are finite."""
    with swapped(nvme_path, fp16={"enabled": True}) as (model, optimizer):
        scaler = nvmeswap.zero3.GradScaler("cpu", init_scale=4.0)
        before = weights(model)
        factor = torch.ones(31)
        factor[-1] = math.inf
        hidden = model[0](torch.ones(2, 20))
        scaler.scale((hidden.float() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def assert_error_if_nonfinite_is_raised_on_all(nvme_path: Path) -> None:
    with swapped(nvme_path) as (model, optimizer):
        factor = torch.ones(31)
        factor[-1] = math.inf
        (model[0](torch.ones(2, 20)) * factor).sum().backward()
        try:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            assert "inf" in str(error)
        else:
            raise AssertionError("no error")
