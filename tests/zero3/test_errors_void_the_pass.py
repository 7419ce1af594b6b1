"""After an error nobody trains on with what it left behind: it is refused, or undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvmeswap.zero3
from nvmeswap.errors import SwapChecksumError, SwapUsageError
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case, build
from tests.zero3.ranks import run_ranks


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def damage(nvme_path: Path) -> Callable[[], None]:
    """Overwrites the parameter file; calling the result puts the bytes back."""
    (path,) = nvme_path.rglob("params.swp")
    before = path.read_bytes()

    def write(data: bytes) -> None:
        with path.open("r+b") as file:
            file.write(data)

    write(b"\xa5" * len(before))
    return lambda: write(before)


def train_step(model: nn.Module, optimizer: Any, seed: int) -> float:
    tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def test_error_in_backward_then_zero_grad_and_the_same_batch_equals_an_undisturbed_run(
    one_rank: None, tmp_path: Path
) -> None:
    """FSDP2 is left in the middle of a pass; going on as if nothing was gave other weights."""
    if not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("before torch 2.13 the pass can't be abandoned: it is refused")
    runs = []
    for disturbed in (True, False):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        case = Case(buffer_count=1)
        model, optimizer = nvmeswap.zero3.shard(build(case), case.config(folder))
        losses = [train_step(model, optimizer, 0)]
        if disturbed:
            loss = model(torch.zeros(2, 5, dtype=torch.long)).sum()
            mend = damage(folder)
            with pytest.raises(SwapChecksumError):
                loss.backward()
            mend()
            with pytest.raises(SwapUsageError, match="zero_grad"):
                model(torch.zeros(2, 5, dtype=torch.long))
            with pytest.raises(SwapUsageError, match="zero_grad"):
                optimizer.step()
            optimizer.zero_grad()
        losses += [train_step(model, optimizer, seed) for seed in (1, 2)]
        runs.append(Run(losses, weights_of(model)))
        optimizer.swap.close()
    assert first_difference(runs[0], runs[1]) is None


def test_gradients_of_a_void_pass_are_refused_on_all_ranks_until_zero_grad(
    tmp_path: Path,
) -> None:
    """Calling step() again would write NaN into every weight of every rank."""
    run_ranks(2, "void_pass_is_refused", tmp_path)


def test_set_up_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """Else the others wait in their first collective until it times out."""
    raised = run_ranks(2, "set_up_fails_on_rank_1", tmp_path)
    assert raised == ["SwapPeerError", "SwapBudgetError"]


def test_zero_grad_of_the_model_forgets_gradients(one_rank: None, tmp_path: Path) -> None:
    """They are in host memory, and not in parameter.grad, where nn.Module looks."""
    case = Case(clip=False)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    model(tokens).sum().backward()
    assert optimizer.swap.stats().optimizer.gradient_nbytes > 0
    model.blocks[0].zero_grad()
    left = optimizer.swap.stats().optimizer.gradient_nbytes
    assert left > 0
    model.zero_grad()
    assert optimizer.swap.stats().optimizer.gradient_nbytes == 0
    before = weights_of(model)
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    optimizer.close()
    assert not list(tmp_path.rglob("*.swp"))


def test_parameter_thawed_after_sharding_is_refused(one_rank: None, tmp_path: Path) -> None:
    """It would never be trained, without a word."""
    case = Case()
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    model.shift.requires_grad_(True)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    with pytest.raises(SwapUsageError, match="shift"):
        optimizer.step()
    optimizer.close()


def test_weights_written_between_passes_are_used_by_the_next(
    one_rank: None, tmp_path: Path
) -> None:
    """The root stays gathered after an evaluation; its old values must not be used again."""
    case = Case(bf16=True)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with torch.no_grad():
        model(tokens)
        state = {name: torch.zeros_like(value) for name, value in weights_of(model).items()}
        for name, value in model.state_dict().items():
            value._local_tensor.copy_(state[name])
        assert (model(tokens) == 0).all()
    optimizer.close()


def test_reentrant_checkpoint_around_a_block_used_twice_is_refused(
    one_rank: None, tmp_path: Path
) -> None:
    """FSDP2 itself computes other gradients there than plain data parallel."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, self.blocks[0]):
                x = checkpoint(block, x, use_reentrant=True)
            return x

    model, optimizer = nvmeswap.zero3.shard(Twice(), Case().config(tmp_path))
    model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    with pytest.raises(SwapUsageError, match="use_reentrant"):
        optimizer.step()
    optimizer.close()


def test_relative_path_still_holds_after_chdir(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder stays behind, or files are looked for elsewhere."""
    (tmp_path / "nvme").mkdir()
    monkeypatch.chdir(tmp_path)
    case = Case()
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(Path("nvme")))
    monkeypatch.chdir("/")
    train_step(model, optimizer, 0)
    optimizer.close()
    assert not list(tmp_path.rglob("rank00000"))

