"""What a review found: each would have been a wrong result, a hang or a dead end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nvmeswap import OverlapSettings, SwappedOptimizer
from nvmeswap.errors import SwapConfigError, SwapManifestError, SwapUsageError
from tests.swap.conftest import Bench, set_gradients

MakeParameters = Callable[..., list[torch.nn.Parameter]]


def test_rate_set_between_backward_and_step_counts_from_the_next_one(tmp_path: Path) -> None:
    """With updates during backward part of a tensor would have been stepped with each."""

    def run(overlap: OverlapSettings | None, when: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(90, 90) for _ in range(4)])
        folder = tmp_path / f"{overlap is None}{when}"
        folder.mkdir()
        optimizer = SwappedOptimizer(
            torch.optim.AdamW, model.parameters(), lr=0.1, nvme_path=folder, sub_group_size=4096,
            pin_memory=False, overlap=overlap,
        )
        for step in range(4):
            if when == "before":
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            model(torch.ones(3, 90)).square().mean().backward()
            if when == "between":
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    expected = run(None, "before")
    assert all(map(torch.equal, run(OverlapSettings(), "between"), expected))


@pytest.mark.parametrize(
    "settings", [{"state_dtype": torch.int32}, {"update_thread_count": 0}], ids=str
)
def test_setting_that_can_not_work_is_refused(
    tmp_path: Path, parameters: MakeParameters, settings: dict[str, object]
) -> None:
    """It would have given wrong values, or a constructor that never ends."""
    with pytest.raises(SwapConfigError):
        SwappedOptimizer(
            torch.optim.AdamW, parameters([10]), nvme_path=tmp_path, **settings  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("overlap", [None, OverlapSettings()], ids=["after", "during"])
def test_sparse_gradient_is_refused_before_anything_is_updated(
    tmp_path: Path, overlap: OverlapSettings | None
) -> None:
    """In the middle of the step there would have been no way back."""
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 8)
    optimizer = SwappedOptimizer(
        torch.optim.SGD, [*head.parameters(), *table.parameters()], lr=0.1, nvme_path=tmp_path,
        pin_memory=False, overlap=overlap,
    )
    values = [parameter.detach().clone() for parameter in table.parameters()]
    with pytest.raises(SwapUsageError, match="sparse"):
        head(table(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, table.parameters(), values))
    if overlap is None:
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("first", [torch.float16, torch.float32])
def test_group_of_another_dtype_is_added_where_all_stays_in_memory(
    tmp_path: Path, parameters: MakeParameters, first: torch.dtype
) -> None:
    """Its slots were of another size, and every later step would have waited in vain."""
    ours = parameters([9 * 4096 + 7], dtype=first)
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, ours, lr=0.1, nvme_path=tmp_path, ratio=0.0, sub_group_size=4096,
        buffer_count=1, pin_memory=False, swap=None,
    )
    set_gradients(ours, 0)
    optimizer.step()
    added = parameters([20_000])
    optimizer.add_param_group({"params": added})
    before = added[0].detach().clone()
    set_gradients([*ours, *added], 1)
    optimizer.step()
    assert not torch.equal(added[0], before)
    optimizer.close()


def test_negative_zero_is_a_value_of_its_own(bench: Bench) -> None:
    """It would have become a positive one where a master is made from the parameter."""
    ours = torch.nn.Parameter(torch.full((5000,), -0.0, dtype=torch.float16))
    optimizer = bench.optimizer(torch.optim.SGD, [ours], lr=0.0)
    with torch.no_grad():
        ours.copy_(torch.full((5000,), -0.0))
    ours.grad = torch.zeros_like(ours)
    optimizer.step()
    assert bool(torch.signbit(ours).all()) and bool(torch.signbit(optimizer.read_state(ours)).all())


def test_state_file_with_damaged_metadata_is_refused(
    tmp_path: Path, parameters: MakeParameters
) -> None:
    """A KeyError tells nobody what to do."""
    optimizer = SwappedOptimizer(
        torch.optim.SGD, parameters([10]), lr=0.1, nvme_path=tmp_path, pin_memory=False
    )
    path = tmp_path / "state"
    for metadata in ({}, {"param_groups": "[]"}, {"param_groups": "[", "scalars": json.dumps({})}):
        save_file({"a": torch.ones(1)}, path, {"format": "nvmeswap.optimizer/1", **metadata})
        with pytest.raises(SwapManifestError):
            optimizer.load(path)
    optimizer.close()


def test_state_dict_reads_each_sub_group_once(bench: Bench, parameters: MakeParameters) -> None:
    """One pass for each parameter and state read the drive several times over."""
    ours = parameters([3000] * 20, dtype=torch.bfloat16)
    optimizer = bench.adamw(ours, buffer_count=1)
    set_gradients(ours, 0)
    optimizer.step()
    before = optimizer.stats().read_nbytes
    optimizer.state_dict()
    stored_nbytes = optimizer.stats().write_nbytes
    assert optimizer.stats().read_nbytes - before <= stored_nbytes
