"""Whatever the optimizer, the sizes and the settings: bit for bit what torch does in RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from nvmeswap.config import SwapBlock
from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.twins import BF16, FP32, RECIPES, Recipe, Shape, Twins, parameters_of

STEPS = 20
SHAPES: list[Shape] = [(0,), (), (1,), (37,), (64, 64), (4097,), (70_000,), (3, 30_000)]
DTYPES = [FP32, BF16, torch.float16]


def make_swapped(recipe: Recipe, params: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        recipe.kind, params, nvme_path=folder, pin_memory=False, **recipe.options, **options
    )


def schedule(kind: str, optimizer: Any) -> LRScheduler | None:
    if kind == "cosine":
        return CosineAnnealingLR(optimizer, T_max=STEPS)
    if kind == "one cycle":
        return OneCycleLR(
            optimizer, max_lr=0.1, total_steps=STEPS + 1,
            cycle_momentum="momentum" in optimizer.defaults or "betas" in optimizer.defaults,
        )
    return None


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe, parameters, settings, and what happens in which step."""
    recipe = draw(st.sampled_from(RECIPES))
    count = draw(st.integers(1, 5))
    steps = st.sets(st.integers(0, STEPS - 1), max_size=4)
    has_no_momentum = recipe.kind is torch.optim.SGD and not recipe.options.get("momentum")
    kinds = ["", "cosine"] if has_no_momentum else ["", "cosine", "one cycle"]
    return {
        "recipe": recipe,
        "shapes": draw(st.lists(st.sampled_from(SHAPES), min_size=count, max_size=count)),
        "dtypes": draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count)),
        "frozen": draw(st.sets(st.integers(0, count - 1), max_size=1)),
        "added": draw(st.sampled_from([None, (), (37,), (9000,)])),
        "options": {
            "sub_group_size": draw(st.sampled_from([1, 8192, 20_000, 1 << 20])),
            "buffer_count": draw(st.integers(1, 4)),
            "ratio": draw(st.sampled_from([0.0, 0.5, 1.0])),
            "swap": SwapBlock(host_memory_nbytes=draw(st.sampled_from([None, 8 << 20]))),
        },
        "accumulation": draw(st.integers(1, 4)),
        "without": {
            step: draw(st.sets(st.integers(0, 4), min_size=1)) for step in draw(steps)
        },
        "skipped": draw(steps),
        "to_none": draw(st.booleans()),
        "schedule": draw(st.sampled_from(kinds)),
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_run_equals_the_plain_optimizer(
    tmp_path_factory: pytest.TempPathFactory, run: dict[str, Any]
) -> None:
    """Else a model trained with state on NVMe is another model.  field cases D01, O02, O06"""
    recipe, folder = run["recipe"], tmp_path_factory.mktemp("run")
    params = parameters_of(run["shapes"], run["dtypes"])
    for index in run["frozen"]:
        params[index].requires_grad_(False)
    twins = Twins(
        recipe, params, lambda groups: make_swapped(recipe, groups, folder, **run["options"])
    )
    schedules = [schedule(run["schedule"], optimizer) for optimizer in twins.both]
    for step in range(STEPS):
        if step == STEPS // 2 and run["added"] is not None and not run["schedule"]:
            twins.add_group(parameters_of([run["added"]], [BF16], seed=1), lr=0.02)
        for micro_batch in range(run["accumulation"]):
            twins.backward(step * 10 + micro_batch, run["without"].get(step, ()))
        if step not in run["skipped"]:  # as GradScaler does where a gradient is not finite
            twins.step()
        for each in filter(None, schedules):
            each.step()
        twins.swapped.zero_grad(set_to_none=run["to_none"])
        twins.assert_same_parameters()
    twins.assert_same()
    assert twins.swapped.stats().step_count == STEPS - len(run["skipped"])
    if run["options"]["ratio"] == 0 and run["added"] is None:
        assert twins.swapped.stats().read_nbytes == twins.swapped.stats().write_nbytes == 0
    twins.swapped.close()
