"""What other systems of module offload get wrong, one test a fault (features 2A, 2B, 3.2)."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager, SwapError
from tests.offload.conftest import Manage
from tests.offload.language import TinyLanguageModel, language_loss
from tests.offload.runs import (
    DIM,
    LEARNING_RATE,
    assert_equal,
    collect,
    frozen,
    infer,
    input_of,
    stack,
    train,
    twins,
    weights_of,
)
from tests.oracle import Run

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
both_kinds = pytest.mark.parametrize("kind", ["frozen", "trained"])


def test_second_model_on_the_same_path_gets_its_own_weights(tmp_path: Path) -> None:
    """After the first one, and beside it. features 3.2, section 4: 16"""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(frozen(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))))
    expected = [infer(model) for model in models]
    with OffloadManager(models[0], "cpu", path=tmp_path):
        assert_equal(infer(models[0]), expected[0])
    with OffloadManager(models[1], "cpu", path=tmp_path):
        with OffloadManager(models[2], "cpu", path=tmp_path):
            for model, numbers in zip(models, expected, strict=True):
                assert_equal(infer(model), numbers)
        assert_equal(infer(models[1]), expected[1])
    assert list(tmp_path.rglob("*.swp")) == []


KILLED = """
import os, sys, torch
from nvmeswap import OffloadManager
model = torch.nn.Linear(64, 64)
torch.nn.init.zeros_(model.weight)
manager = OffloadManager(model, "cpu", path=sys.argv[1], trainable="nvme")
model(torch.ones(64)).sum().backward()
os._exit(9)
"""


def test_files_of_a_killed_process_are_removed_and_never_read(tmp_path: Path) -> None:
    """features 3.2, section 4: 16"""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120)
    assert killed.returncode == 9
    (left,) = tmp_path.rglob("*.swp")
    plain, model = (nn.Linear(64, 64) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    x = torch.ones(2, 64)
    with OffloadManager(model, "cpu", path=tmp_path, trainable="nvme"):
        assert not left.exists()
        assert torch.equal(model(x), plain(x))


def nothing(*_: Any) -> None:
    """Where a module has a hook, torch's encoder layers compute another way (to an ulp)."""


@tiers
def test_released_component_keeps_what_was_done_to_it(manage: Manage, tier: str) -> None:
    """features C1, C2, section 4: 20"""
    plain, model = twins(TinyLanguageModel)
    manager = manage(frozen(model), tier=tier, keep_resident_bytes=1 << 20)
    frozen(plain)
    manager.load()
    assert manager.stats().resident_unit_count == manager.stats().unit_count
    for each in (plain, model):
        each.eval()
        each.blocks[0].linear1.register_forward_hook(nothing)
        each.blocks[1].linear1.register_forward_hook(nothing)
        each.flag = "set after loading"
        with torch.no_grad():
            for block in each.blocks:
                block.linear1.weight.mul_(0.5)
    manager.release()
    assert manager.stats().resident_nbytes == 0
    assert model.flag == "set after loading" and not model.training
    assert_equal(infer(model, language_loss), infer(plain, language_loss))


@tiers
def test_unified_memory_needs_no_second_copy_in_ram(manage: Manage, tier: str) -> None:
    """The CPU tier does nothing there, and says so once; NVMe still serves. features C12,
    section 4: 24"""
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier, unified_memory=True)
    assert_equal(train(model), train(plain))
    assert (manager.stats().bring_count == 0) == (tier == "cpu")
    manager.release()
    assert_equal(infer(model), infer(plain))
    manager.close()
    assert_equal(infer(model), infer(plain))


@tiers
def test_buffers_that_stay_are_right_too(manage: Manage, tier: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(DIM, DIM), nn.BatchNorm1d(5))

    plain, model = twins(build)
    place = model[0].running_mean.data_ptr()
    manager = manage(model, tier=tier, trainable=tier, buffers="resident")
    place = model[0].running_mean.data_ptr()
    assert_equal(train(model), train(plain))
    assert model[0].running_mean.data_ptr() == place
    manager.close()
    assert_equal(infer(model), infer(plain))


@tiers
def test_memory_that_is_not_page_locked_serves(manage: Manage, tier: str) -> None:
    """features A17"""
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier, pin_memory=False)
    assert_equal(train(model), train(plain))


@tiers
def test_another_thread_may_call_the_model(manage: Manage, tier: str) -> None:
    """One at a time. features F21"""
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier)
    results: list[Run] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(train(model)))
        thread.start()
        thread.join()
    for ours in results:
        assert_equal(ours, train(plain))


def test_partitioned_parameters_are_refused_by_name(manage: Manage) -> None:
    """Of DeepSpeed's ZeRO. features A32"""
    model = stack()
    model[2].weight.ds_id = 3
    with pytest.raises(SwapError, match=r"2\.weight") as raised:
        manage(model, tier="cpu")
    assert raised.value.fix


@tiers
def test_no_warning_is_silenced_and_none_is_given(manage: Manage, tier: str) -> None:
    """features 2A: a filter for the whole process"""
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        model = stack()
        manager = manage(model, tier=tier, trainable=tier)
        train(model)
        manager.close()
        assert list(warnings.filters) == before
    assert [str(each.message) for each in caught if "nvmeswap" in str(each.filename)] == []
    assert list(warnings.filters) == filters


@tiers
def test_old_values_are_not_kept(manage: Manage, tier: str) -> None:
    """field case B12"""
    model = frozen(stack())
    manager = manage(model, tier=tier)
    seen: list[Any] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda m, _: seen.append(weakref.ref(m.weight.data)))
    infer(model)
    collect()
    assert [each() for each in seen] == [None] * len(seen) and seen
    assert manager.stats().resident_nbytes == 0


@tiers
def test_average_of_weights_is_kept_up(manage: Manage, tier: str) -> None:
    """The usual moving average over a managed model."""
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier)
    averages = []
    for each in (plain, model):
        average = torch.optim.swa_utils.AveragedModel(each)
        for _ in range(2):
            train(each, steps=1)
            average.update_parameters(each)
        averages.append(weights_of(average.module))
    assert averages[0].keys() == averages[1].keys()
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


@tiers
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_gradients_are_clipped_and_optimizers_call_back(
    manage: Manage, tier: str, kind: type[torch.optim.Optimizer]
) -> None:
    plain, model = stack(), stack()
    manage(model, tier=tier, trainable=tier)
    for each in (plain, model):
        optimizer = kind(each.parameters(), lr=LEARNING_RATE)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = each(input_of(0)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_equal(infer(model), infer(plain))
