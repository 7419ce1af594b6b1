"""`overlap_step`: sub-groups are updated during backward, and no bit differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import nvmeswap.zero3
from nvmeswap import SwapError
from nvmeswap.errors import SwapConfigError, SwapUsageError
from tests.oracle import first_difference
from tests.zero3.cases import Case, build, run_in_ram, run_swapped
from tests.zero3.ranks import run_ranks


def overlapped(case: Case, **changes: object) -> Case:
    settings = {"min_swap_nbytes": 1000, "overlap_step": True}
    extra = {"nvmeswap": settings, "gradient_accumulation_steps": case.accumulation, **changes}
    return Case(**{**vars(case), "extra": extra})


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(bf16=True, buffer_count=1),
        Case(bf16=True, checkpointing=True, max_in_cpu=10**9),
        Case(accumulation=3),
        Case(bf16=True, params="none"),
        Case(params="cpu", optimizer="cpu"),
    ],
    ids=str,
)
def test_run_equals_ram(one_rank: None, tmp_path: Path, case: Case) -> None:
    assert first_difference(run_swapped(overlapped(case), tmp_path), run_in_ram(case)) is None


@pytest.mark.slow
def test_run_on_two_ranks_equals_ram(tmp_path: Path) -> None:
    cases = [overlapped(Case()), overlapped(Case(bf16=True, accumulation=2, checkpointing=True))]
    run_ranks(2, "equals_ram", tmp_path, cases=cases)


class Penalised(torch.nn.Module):
    """Its shards are in the loss themselves, and its head is called in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 64)
        self.head = torch.nn.Linear(64, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def penalised_weights(nvme_path: Path | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Penalised()
    for module in (model.body, model.head, model):
        fully_shard(module)
    if nvme_path is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        config = Case(buffer_count=1).config(nvme_path)
        config["nvmeswap"] = {"min_swap_nbytes": 0, "overlap_step": True}
        model, optimizer = nvmeswap.zero3.shard(model, config)
    for step in range(4):
        hidden = model(torch.full((6, 16), 1.0 + step))
        loss = sum(model.head(chunk).square().sum() for chunk in hidden.chunk(3))
        # Taken from the shards themselves, its gradient comes apart from the reduced one.
        loss = loss + sum((p.full_tensor() ** 2).sum() for p in model.body.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: v.full_tensor().detach().clone() for n, v in model.state_dict().items()}
    if nvme_path is not None:
        optimizer.close()
    return weights


def test_gradient_that_comes_several_times_is_used_when_it_is_whole(
    one_rank: None, tmp_path: Path
) -> None:
    expected = penalised_weights(None)
    got = penalised_weights(tmp_path)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_more_backward_passes_than_were_announced_are_refused(
    one_rank: None, tmp_path: Path
) -> None:
    case = overlapped(Case())
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    try:
        for _ in range(2):
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(tokens).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(SwapUsageError, match="after its update had begun"):
            loss.backward()
        with pytest.raises(SwapError, match="load"):
            optimizer.step()
    finally:
        optimizer.close()


def _is_used(model: torch.nn.Module) -> bool:
    try:
        model.blocks[3].up.weight.grad.to_local().sum()
    except SwapUsageError:
        return True
    return False


def test_between_backward_and_step_nothing_is_silently_wrong(
    one_rank: None, tmp_path: Path
) -> None:
    """Half of the weights are new there, and most gradients given up."""
    case = overlapped(Case())
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    try:
        model(tokens).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(tokens).sum().backward()
        with torch.no_grad(), pytest.raises(SwapUsageError, match=r"call step\(\) first"):
            model(tokens)
        with pytest.raises(SwapUsageError, match=r"call step\(\) first"):
            model.zero_grad()
        while not _is_used(model):  # its update is under way
            pass
        with pytest.raises(SwapUsageError, match="used during backward"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        model(tokens).sum().backward()
        optimizer.step()
    finally:
        optimizer.close()


def test_shard_that_can_not_be_read_in_backward_leaves_nothing_unsaid(
    one_rank: None, tmp_path: Path
) -> None:
    """Some parameters are of the next step by then: all is refused until a state is loaded."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("before torch 2.13 the pass can't be abandoned: it is refused")
    case = overlapped(Case(buffer_count=1))
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    try:
        for _ in range(2):
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        loss = model(tokens).sum()
        (path,) = tmp_path.rglob("params.swp")
        with path.open("r+b") as file:  # where the second of four blocks is
            file.seek(path.stat().st_size // 3)
            file.write(b"\xa5" * (path.stat().st_size // 8))
        with pytest.raises(SwapError):
            loss.backward()
        with pytest.raises(SwapError, match="load the last checkpoint"):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(SwapError, match="load"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        model(tokens).sum().backward()
        optimizer.step()
    finally:
        optimizer.close()


def test_what_needs_all_gradients_first_is_refused(one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(SwapConfigError, match="gradient_clipping"):
        nvmeswap.zero3.shard(
            build(Case()), overlapped(Case(), gradient_clipping=1.0).config(tmp_path)
        )
    case = overlapped(Case())
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    try:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
        with pytest.raises(SwapUsageError, match="total norm"):
            optimizer.clip_grad_norm_(1.0)
    finally:
        optimizer.close()


@pytest.mark.parametrize("kind", [nvmeswap.zero3.GradScaler, torch.amp.GradScaler])
def test_scaled_gradients_are_refused_and_nothing_goes_on_with_them(
    one_rank: None, tmp_path: Path, kind: type[torch.amp.GradScaler]
) -> None:
    case = overlapped(Case())
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    scaler = kind("cpu", init_scale=4.0)
    try:
        scaler.scale(model(torch.zeros(2, 3, dtype=torch.long)).sum()).backward()
        for step in (lambda: scaler.step(optimizer), optimizer.step):
            with pytest.raises(SwapUsageError, match="GradScaler"):
                step()
    finally:
        optimizer.close()
