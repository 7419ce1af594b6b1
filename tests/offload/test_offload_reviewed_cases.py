"""Cases that reviewers found: each was wrong, or told badly, once."""

from __future__ import annotations

import errno
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager
from nvmeswap.errors import (
    SwapClosedError,
    SwapConfigError,
    SwapPathError,
    SwapReadError,
    SwapUsageError,
)
from nvmeswap.io.engine import Engine
from nvmeswap.memory.budget import HostMemory
from nvmeswap.offload import manager_of
from tests.offload.conftest import Manage
from tests.offload.runs import DIM, assert_equal, collect, frozen, infer, input_of, stack, train

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
WIDE = 256  # so that a layer goes to NVMe, and not to the memory of the small ones


def wide(model: nn.Module, x: torch.Tensor, number: int) -> Any:
    return model(x.repeat(1, 1, WIDE // DIM))


# --- what is refused, before anything is made ----------------------------------------------------


def conjugate() -> nn.Module:
    model = nn.Linear(DIM, DIM, dtype=torch.complex64)
    model.weight = nn.Parameter(model.weight.detach().conj())
    return model


@pytest.mark.parametrize(
    ("build", "told"),
    [(conjugate, "weight is a conjugate"),
     (lambda: nn.Sequential(nn.LazyLinear(4)), r"0\.weight has no shape yet"),
     (lambda: nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4))), '"1" is a .*Script')],
    ids=["conjugate", "lazy", "scripted"],
)
def test_model_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, build: Any, told: str
) -> None:
    model = build()
    with pytest.raises(SwapUsageError, match=told) as raised:
        OffloadManager(model, "cpu", path=tmp_path)
    assert raised.value.fix
    assert manager_of(model) is None
    assert list(tmp_path.iterdir()) == []


def test_conjugate_that_was_resolved_is_served(manage: Manage) -> None:
    model = conjugate()
    x = torch.randn(2, DIM, dtype=torch.complex64)
    expected = model(x)
    model.weight = nn.Parameter(model.weight.detach().resolve_conj())
    manage(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    "options",
    [{"device": "meta"}, {"device": "mps"}, {"device": "xpu"}, {"device": "nowhere"},
     {"prefetch": None}, {"prefetch": "2"}, {"max_in_cpu": None}, {"buffer_count": 1.5},
     {"unified_memory": True, "tier": "cpu", "trainable": "nvme"}],
    ids=str,
)
def test_setting_of_another_kind_is_told_with_its_fix(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = stack()
    with pytest.raises(SwapConfigError) as raised:
        OffloadManager(model, **{"device": "cpu", "path": tmp_path, **options})
    assert raised.value.fix
    assert_equal(infer(model), infer(stack()))


# --- who manages what -----------------------------------------------------------------------------


def test_part_of_an_offloaded_model_is_called_so(manage: Manage) -> None:
    model = stack()
    manage(model)
    with pytest.raises(SwapUsageError, match='"the model" is a part of a model that is offloaded'):
        manage(model[0])
    with pytest.raises(SwapUsageError, match='"0" is offloaded already'):
        manage(nn.Sequential(model))


@tiers
def test_module_that_left_the_model_is_free_after_close(manage: Manage, tier: str) -> None:
    model = stack()
    manager = manage(model, tier=tier, trainable=tier)
    left = model[1]
    model[1] = nn.Linear(DIM, DIM)
    infer(model)
    manager.close()
    assert manager_of(left) is None
    expected = infer(left)
    manage(nn.Sequential(left), tier=tier, trainable=tier)
    assert_equal(infer(left), expected)


@tiers
def test_model_and_manager_that_nobody_has_go_together(tmp_path: Path, tier: Any) -> None:
    model = stack()
    manager = OffloadManager(model, "cpu", tier=tier, path=tmp_path, trainable=tier)
    train(model, steps=1)
    gone = weakref.ref(model), weakref.ref(manager)
    del model, manager
    collect()
    assert [each() for each in gone] == [None, None]
    assert list(tmp_path.rglob("*.swp")) == []


# --- what changes after construction --------------------------------------------------------------


class Masked(nn.Module):
    """Makes its mask where it is called first, and again when it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask.shape[0] < x.shape[0]:
            self.mask = torch.full((x.shape[0], 1), 0.5)
        result: torch.Tensor = self.inner(x) * self.mask[: x.shape[0]]
        return result


@tiers
@pytest.mark.parametrize("buffers", ["swap", "resident"])
def test_buffer_made_in_inference_mode_is_used(manage: Manage, tier: str, buffers: str) -> None:
    torch.manual_seed(0)
    model = Masked()
    x = torch.randn(5, DIM)
    expected = {count: (model.inner(x[:count]) * 0.5).detach() for count in (2, 3, 5)}
    manage(model, tier=tier, buffers=buffers)
    with torch.inference_mode():
        for count in (2, 3, 5, 5):
            assert torch.equal(model(x[:count]), expected[count])
    with torch.no_grad():
        assert torch.equal(model(x), expected[5])


class Growing(nn.Module):
    """A cache that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("cache", torch.zeros(1, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, self.inner(x).detach()])
        return self.cache.sum(0)


@pytest.mark.parametrize("buffers", ["swap", "resident"])
def test_buffers_that_were_replaced_are_forgotten(manage: Manage, buffers: str) -> None:
    model = Growing()
    manage(model, tier="cpu", trainable="cpu", buffers=buffers)
    made = []
    for _ in range(8):
        model(torch.ones(2, DIM))
        made.append(weakref.ref(model.cache))
    gc.collect()
    assert sum(each() is not None for each in made) <= 3
    assert model.cache.shape == (17, DIM)


@tiers
def test_leaf_that_is_the_whole_model_may_be_given_another_weight(
    manage: Manage, tier: str
) -> None:
    model, plain = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    manage(model, tier=tier, trainable=tier)
    infer(model)
    old = weakref.ref(model.weight)
    model.weight, model.bias = (nn.Parameter(each.detach().clone()) for each in plain.parameters())
    assert_equal(infer(model), infer(plain))
    gc.collect()
    assert old() is None  # the new one has its home


# --- values on the meta device --------------------------------------------------------------------


def values_of(plain: nn.Module) -> Any:
    state = plain.state_dict()

    def values(name: str, start: int, out: torch.Tensor) -> None:
        out.copy_(state[name].view(-1)[start : start + out.numel()])

    return values


@tiers
@pytest.mark.parametrize("trainable", ["resident", "cpu"])
def test_construction_that_fails_leaves_a_meta_model_on_meta(
    tmp_path: Path, tier: Any, trainable: Any
) -> None:
    plain = stack()
    with torch.device("meta"):
        model = stack()
    for each in (plain, model):
        each[:4].requires_grad_(False)
    parameters = dict(model.named_parameters())
    values, left = values_of(plain), 9

    def fails(name: str, start: int, out: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise ZeroDivisionError
        values(name, start, out)

    options: Any = {"tier": tier, "path": tmp_path, "trainable": trainable}
    for attempt in range(1, 13):
        left = attempt
        with pytest.raises(ZeroDivisionError):
            OffloadManager(model, "cpu", values=fails, **options)
        for name, parameter in model.named_parameters():
            assert parameter.is_meta and parameter is parameters[name]
            assert parameter.requires_grad == (name[0] in "45")
        assert list(tmp_path.rglob("*.swp")) == []
    with OffloadManager(model, "cpu", values=values, **options):
        assert_equal(infer(model), infer(plain))
    assert not any(parameter.is_meta for parameter in model.parameters())


# --- the end --------------------------------------------------------------------------------------


def test_error_of_the_block_is_not_replaced_by_that_of_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engines: list[Engine]
) -> None:
    model = frozen(stack(dim=WIDE))
    manager = OffloadManager(model, "cpu", path=tmp_path)
    with pytest.raises(ZeroDivisionError), manager:
        engines[-1].inject(f"read * errno {errno.EIO}")
        raise ZeroDivisionError
    assert "could not be closed" in caplog.text
    with pytest.raises(SwapReadError), manager:
        pass
    engines[-1].inject("")
    manager.close()
    assert manager_of(model) is None
    assert_equal(infer(model, wide), infer(frozen(stack(dim=WIDE)), wide))


def test_model_larger_than_memory_stays_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = frozen(stack(dim=WIDE)), frozen(stack(dim=WIDE))
    x = torch.randn(2, WIDE)
    room = HostMemory(1000, "the test")
    manager = OffloadManager(model, "cpu", path=tmp_path)
    with pytest.warns(UserWarning, match="bytes are on NVMe") as warned, manager:
        model(x)
        monkeypatch.setattr("nvmeswap.offload.build.available_host_memory", lambda: room)
    assert len(warned) == 1
    manager.close()
    assert torch.equal(model(x), plain(x))
    assert list(tmp_path.rglob("*.swp")) == []


# --- materialize ----------------------------------------------------------------------------------


@tiers
def test_materialize_to_read_writes_nothing(manage: Manage, tier: str) -> None:
    model = frozen(stack(2, WIDE))
    manager = manage(model, tier=tier)
    before = manager.stats().out_nbytes
    with manager.materialize(write=False):
        values = [parameter.clone() for parameter in model.parameters()]
    assert manager.stats().out_nbytes == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))


def test_materialize_writes_a_block_on_nvme_once(manage: Manage) -> None:
    plain, model = frozen(stack(2, WIDE)), frozen(stack(2, WIDE))
    manager = manage(model)
    nbytes = manager.units[0].nbytes
    before = manager.stats().out_nbytes
    with manager.materialize("0"):
        for each in (model[0].weight, model[0].bias):  # unseen, and other memory
            each.data.mul_(2)
            each.data = each.data.clone()
        model[0].bias.add_(1)
    assert manager.stats().out_nbytes - before == nbytes
    plain[0].weight.mul_(2)
    plain[0].bias.mul_(2).add_(1)
    x = torch.randn(2, WIDE)
    assert torch.equal(model(x), plain(x))


# --- the optimizer --------------------------------------------------------------------------------


def test_optimizer_over_what_was_frozen_on_nvme_is_refused(manage: Manage) -> None:
    model = frozen(stack(4, WIDE))
    model[3].requires_grad_(True)
    manager = manage(model, trainable="nvme")
    model[2].requires_grad_(True)
    with pytest.raises(SwapUsageError, match=r"2\.weight .*was frozen") as raised:
        manager.optimizer(torch.optim.AdamW, lr=1e-2)
    assert raised.value.fix
    optimizer = manager.optimizer(torch.optim.AdamW, model[3].parameters(), lr=1e-2)
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()
    optimizer.close()


def test_optimizer_over_trained_ones_beside_frozen_ones_with_gaps(manage: Manage) -> None:
    model = frozen(stack(2, WIDE))
    model[0].weight = nn.Parameter(torch.randn(WIDE, WIDE).t(), requires_grad=False)
    model[1].requires_grad_(True)
    manager = manage(model, trainable="nvme")
    optimizer = manager.optimizer(torch.optim.SGD, lr=1e-2)
    before = model[1].weight.clone()
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    optimizer.close()


def test_optimizer_without_a_path_is_told_where_to_name_one(manage: Manage) -> None:
    model = stack()
    manager = manage(model, tier="cpu")
    with pytest.raises(SwapPathError, match="manager has no path") as raised:
        manager.optimizer(torch.optim.AdamW)
    assert "nvme_path=" in str(raised.value.fix)


def test_optimizer_that_outlives_its_manager_says_what_to_do(manage: Manage) -> None:
    model = stack(2, WIDE)
    manager = manage(model, trainable="nvme")
    optimizer = manager.optimizer(torch.optim.AdamW)
    model(torch.ones(2, WIDE)).sum().backward()
    optimizer.step()
    weight = model[0].weight.detach().clone()
    manager.close()
    assert torch.equal(model[0].weight, weight)
    model(torch.ones(2, WIDE)).sum().backward()
    with pytest.raises(SwapClosedError) as raised:
        optimizer.step()
    assert "close() the optimizer before" in str(raised.value.fix)
    assert torch.equal(model[0].weight, weight)
    optimizer.close()


def test_optimizer_over_weights_in_memory_outlives_its_manager(
    manage: Manage, tmp_path: Path
) -> None:
    plain, model = stack(2), stack(2)
    manager = manage(model, tier="cpu", trainable="cpu")
    optimizer = manager.optimizer(torch.optim.SGD, lr=1e-2, nvme_path=tmp_path)
    manager.close()
    model(input_of(0)).sum().backward()
    optimizer.step()
    optimizer.close()
    plain(input_of(0)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1e-2, fused=True).step()
    assert_equal(infer(model), infer(plain))


# --- what is told ---------------------------------------------------------------------------------


def test_log_names_where_trained_parameters_are(
    manage: Manage, caplog: pytest.LogCaptureFixture
) -> None:
    model = stack(4, WIDE)
    model[0].requires_grad_(False)
    caplog.set_level(logging.INFO, "nvmeswap")
    manager = manage(model)
    trained = sum(each.nbytes for each in model[1:].parameters())
    assert f"{trained} always on the device" in caplog.text
    assert 'trained parameters: "resident"' in caplog.text
    manager.close()


# --- converted by hand ----------------------------------------------------------------------------


@tiers
@pytest.mark.parametrize("options", [{}, {"keep_resident_bytes": 1 << 20}], ids=str)
def test_model_that_was_converted_after_a_forward_can_be_closed(
    manage: Manage, tier: str, options: dict[str, Any]
) -> None:
    """Converted values stay converted."""
    plain, model = frozen(stack()), frozen(stack())
    manager = manage(model, tier=tier, **options)
    model(input_of(0).requires_grad_())  # the last layer is still there: backward may come
    model.to(torch.bfloat16)
    manager.close()
    plain.to(torch.bfloat16)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
