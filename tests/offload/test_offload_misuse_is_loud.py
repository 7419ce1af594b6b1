"""Wrong settings and calls that can't be served are told, with their fix; nothing is changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nvmeswap import OffloadManager
from nvmeswap.errors import (
    SwapClosedError,
    SwapError,
)
from tests.offload.conftest import Manage
from tests.offload.runs import (
    assert_equal,
    infer,
    stack,
    train,
)

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])


@tiers
def test_closed_manager_refuses_and_the_model_goes_on(manage: Manage, tier: str) -> None:
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    infer(model)
    manager.close()
    manager.close()
    for refused in (manager.load, manager.state_dict):
        with pytest.raises(SwapClosedError):
            refused()
    with pytest.raises(SwapClosedError), manager.materialize("0"):
        pass
    assert_equal(train(model), train(plain))


@tiers
def test_model_that_is_managed_already_is_refused(manage: Manage, tier: str) -> None:
    """A part of it too. field case E04"""
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    for part in (model, model[0], nn.Sequential(model)):
        with pytest.raises(SwapError) as raised:
            manage(part, tier=tier, trainable=tier)
        assert raised.value.fix
    assert_equal(train(model), train(plain))
    manager.close()
    manage(model, tier=tier, trainable=tier)
    assert_equal(infer(model), infer(plain))


@pytest.mark.parametrize(
    "options",
    [{"tier": "disk"}, {"granularity": "leaves"}, {"granularity": 0}, {"granularity": "12 apples"},
     {"prefetch": -1}, {"trainable": "gpu"}, {"buffers": "yes"}, {"buffer_count": 0},
     {"keep_resident_bytes": -1}, {"tier": "nvme", "path": None}, {"path": "/no/such/folder"},
     {"tier": "cpu", "trainable": "nvme", "path": None}, {"unified_memory": "maybe"}],
    ids=str,
)
def test_setting_that_is_wrong_is_told_with_its_fix(options: dict[str, Any]) -> None:
    model = stack()
    with pytest.raises(SwapError) as raised:
        OffloadManager(model, "cpu", **options)
    assert raised.value.fix
    assert_equal(infer(model), infer(stack()))


def test_table_of_field_cases_names_real_tests() -> None:
    """docs/offload_field_cases.md."""
    here = Path(__file__).parent
    table = (here.parents[1] / "docs" / "offload_field_cases.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", table))
    assert len(named) > 50
    for file, test in sorted(named):
        assert f"def {test}(" in (here / file).read_text(), f"{file}::{test}"
