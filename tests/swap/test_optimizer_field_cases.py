"""Faults that users of such optimizers met, each with its small input."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.conftest import Bench
from tests.swap.twins import ADAMW, BF16, FP32, Recipe, Twins, parameters_of


def swapped_over(groups: Any, folder: Path, recipe: Recipe = ADAMW, **options: Any) -> Any:
    options = {"pin_memory": False, "sub_group_size": 4096, **options}
    return SwappedOptimizer(recipe.kind, groups, nvme_path=folder, **recipe.options, **options)


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    """Several sub-groups of mixed dtypes."""
    params = parameters_of([(37,), (9000,), (5000,)], [FP32, BF16, torch.float16])
    made = Twins(ADAMW, params, lambda groups: swapped_over(groups, tmp_path))
    yield made
    made.swapped.close()


def run(twins: Twins, steps: range) -> None:
    for step in steps:
        twins.backward(step)
        twins.step()
        twins.swapped.zero_grad()


# field case D01
def test_layers_small_and_large_train_as_in_ram(tmp_path: Path) -> None:
    """Gradients that are left out make a loss that falls more slowly, and no error."""
    losses: list[list[float]] = []
    models = []
    for swaps in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.LayerNorm(256), nn.Linear(256, 3))
        options: dict[str, Any] = {"lr": 1e-2}
        optimizer: torch.optim.Optimizer = (
            swapped_over(model.parameters(), tmp_path)
            if swaps
            else torch.optim.AdamW(model.parameters(), fused=True, **options)
        )
        data = torch.randn(20, 8, 64, generator=torch.Generator().manual_seed(1))
        losses.append([])
        for number, batch in enumerate(data):
            loss = (model(batch) - batch[:, :3]).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
        if isinstance(optimizer, SwappedOptimizer):
            optimizer.close()
    assert losses[0] == losses[1]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


# field case D06
def test_use_right_after_a_step_waits_for_what_is_on_its_way(bench: Bench) -> None:
    """Reads begun ahead and writes behind must not meet what comes next."""
    twins = Twins(
        ADAMW,
        parameters_of([(9000,), (5000,)], [BF16, torch.float16]),
        lambda groups: bench.optimizer(ADAMW.kind, groups, buffer_count=2, **ADAMW.options),
    )
    bench.engine.inject("seed 7 rate 50 late,busy")
    for step in range(200):
        run(twins, range(step, step + 1))
        index = step % 2
        read = twins.swapped.read_state(twins.params[index], "exp_avg")
        assert torch.equal(read, twins.plain.state[twins.masters[index]]["exp_avg"]), step
    twins.assert_same()


# field case D10
def test_parameters_stay_what_they_are(twins: Twins) -> None:
    """Code elsewhere holds them, their gradients and what it has hung on them."""
    twins.params[1].mark = "mine"  # type: ignore[attr-defined]
    twins.params[2].requires_grad_(False)
    places = [parameter.data_ptr() for parameter in twins.params]
    twins.backward(0)
    gradients = [parameter.grad for parameter in twins.params]
    twins.step()
    twins.swapped.zero_grad(set_to_none=False)
    assert all(
        parameter.grad is gradient
        for parameter, gradient in zip(twins.params, gradients, strict=True)
    )
    assert [parameter.data_ptr() for parameter in twins.params] == places
    assert [parameter.requires_grad for parameter in twins.params] == [True, True, False]
    assert twins.params[1].mark == "mine"  # type: ignore[attr-defined]
    twins.assert_same_parameters()


# field case D11
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_first_step_is_corrected_as_the_first(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """States that are made by a step without a rate count it."""
    recipe = Recipe(kind, {"lr": 1e-2, "weight_decay": 0.1}, {})
    twins = Twins(
        recipe,
        parameters_of([(37,), (9000,)], [FP32, BF16]),
        lambda groups: swapped_over(groups, tmp_path, recipe),
    )
    assert twins.swapped.state_dict()["state"] == {}
    assert not twins.swapped.read_state(twins.params[1], "exp_avg_sq").any()
    run(twins, range(1))
    twins.assert_same()
    assert all(state["step"] == 1 for state in twins.swapped.state_dict()["state"].values())
    twins.swapped.close()


# field case F02
def test_script_run_twice_in_one_folder_leaves_and_names_the_same_files(tmp_path: Path) -> None:
    """Else a drive fills up, or states are found under names that nobody knows."""
    seen = []
    for _ in range(2):
        params = parameters_of([(37,), (9000,)], [FP32, BF16])
        swapped = swapped_over(params, tmp_path)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        swapped.step()
        swapped.flush()
        seen.append(
            sorted((path.name, path.stat().st_size) for path in tmp_path.rglob("*.swp"))
        )
        swapped.close()
        assert not list(tmp_path.rglob("*.swp"))
    assert seen[0] == seen[1] != []


# field case F05
def test_states_that_are_loaded_keep_their_dtype_and_place(twins: Twins) -> None:
    """Moved to where the parameter is, they would not fit the next step."""
    run(twins, range(2))
    saved = copy.deepcopy(twins.swapped.state_dict())
    kinds = {
        (number, name): (value.dtype, value.device, value.shape)
        for number, state in saved["state"].items()
        for name, value in state.items()
    }
    twins.swapped.load_state_dict(saved)
    again = twins.swapped.state_dict()
    assert kinds == {
        (number, name): (value.dtype, value.device, value.shape)
        for number, state in again["state"].items()
        for name, value in state.items()
    }
    assert all(
        value.dtype is FP32 and value.is_cpu
        for state in again["state"].values() for value in state.values()
    )
    run(twins, range(2, 4))
    twins.assert_same()


# field case O01
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_over_gradients_on_the_cpu_equals_torch(twins: Twins, norm_type: float) -> None:
    """The norm is torch's to the last bit, and so is what is clipped."""
    twins.backward(0)
    others = [torch.zeros_like(parameter) for parameter in twins.params]
    for other, parameter in zip(others, twins.params, strict=True):
        assert parameter.grad is not None
        other.grad = parameter.grad.clone()
    expected = nn.utils.clip_grad_norm_(others, 1.0, norm_type)
    assert torch.equal(twins.swapped.clip_grad_norm_(1.0, norm_type), expected)
    twins.step()
    for other, parameter in zip(others, twins.params, strict=True):
        assert other.grad is not None and parameter.grad is not None
        assert torch.equal(other.grad, parameter.grad)
    twins.assert_same()
    assert twins.params[0].grad is not None
    twins.params[0].grad[0] = torch.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        twins.swapped.clip_grad_norm_(1.0, error_if_nonfinite=True)


# field case O02
def test_micro_batches_of_one_batch_give_one_update(tmp_path: Path) -> None:
    """Overwritten instead of added, the last one alone would count."""
    batch = torch.randint(-8, 8, (4, 9000), generator=torch.Generator().manual_seed(0)).float()
    results = []
    for count in (1, 2, 4):
        params = parameters_of([(9000,)], [FP32])
        swapped = swapped_over(params, tmp_path)
        for _ in range(3):
            for part in batch.chunk(count):
                (params[0] * part).sum().backward()  # whole numbers: any order gives one sum
            swapped.step()
            swapped.zero_grad()
        results.append(params[0].detach())
        swapped.close()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# field case O03
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_in_memory_are_never_written(bench: Bench, micro_batches: int) -> None:
    """They are there; only state goes to the drive."""
    params = parameters_of([(9000,), (5000,)], [BF16, FP32])
    swapped = bench.optimizer(torch.optim.AdamW, params)
    for _ in range(3):
        for _ in range(micro_batches):
            sum(parameter.float().sum() for parameter in params).backward()
        swapped.step()
        swapped.zero_grad()
    swapped.flush()
    assert bench.store.stats().write_nbytes == swapped.stats().write_nbytes > 0


# field case O06
def test_group_of_small_and_large_tensors_equals_ram(tmp_path: Path) -> None:
    """Which part of what is where must be known for each."""
    twins = Twins(
        ADAMW,
        parameters_of([(64,), (262_144,), (1_000_000,)], [FP32, BF16, FP32]),
        lambda groups: swapped_over(
            groups, tmp_path, sub_group_size=262_144, ratio=0.5, buffer_count=1
        ),
    )
    run(twins, range(3))
    twins.assert_same()
    stats = twins.swapped.stats()
    assert 0 < stats.in_ram_count < stats.sub_group_count
    twins.swapped.close()
