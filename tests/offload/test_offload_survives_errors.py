"""After any error the device is empty, the error is the original one, and trying again is right.

Torch tells nobody that a backward has failed, nor of Ctrl-C in a forward: what they leave, the
window at most, goes with the next forward, or with `after_backward()`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvmeswap import OffloadManager
from tests.offload.conftest import Manage
from tests.offload.runs import (
    DIM,
    assert_equal,
    frozen,
    input_of,
    one_pass,
    stack,
    train,
)
from tests.swap.interrupts import Interrupt, interrupted_everywhere

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])


class Boom(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


class Fuse(nn.Module):
    """Raises where it is told to; in other calls it is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.error: type[BaseException] = Boom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" or (
            self.where == "recomputation" and torch._C._current_graph_task_id() != -1
        ):
            raise self.error
        return RaisesInBackward.apply(x) if self.where == "backward" else x.clone()


class Fused(nn.Module):
    """Layers of which one may fail, inside a block."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.first, self.last = stack(2), stack(2)
        self.fuse = Fuse()
        self.middle = nn.Sequential(nn.Linear(DIM, DIM), self.fuse, nn.Linear(DIM, DIM))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointing == "none":
            x = self.middle(x)
        else:
            reentrant = self.checkpointing == "reentrant"
            x = checkpoint(self.middle, x, use_reentrant=reentrant)
        return self.last(x)


def fused(checkpointing: str = "none") -> Fused:
    torch.manual_seed(0)
    return Fused(checkpointing)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, MemoryError])
@tiers
def test_error_of_the_model_comes_out_and_leaves_nothing(
    manage: Manage, tier: str, where: str, error: type[BaseException], checkpointing: str
) -> None:
    """features C5, C6, F10, G1, section 4: 9"""
    if where == "recomputation" and checkpointing == "none":
        pytest.skip("nothing is computed again")
    expected = one_pass(fused(checkpointing))
    model = fused(checkpointing)
    manager = manage(model, tier=tier, trainable=tier)
    for _ in range(2):
        model.fuse.where, model.fuse.error = where, error
        with pytest.raises(Boom if where == "backward" else error):
            one_pass(model)
        assert_emptied(manager, is_told=where == "forward" and issubclass(error, Exception))
        model.fuse.where = ""
        assert_equal(one_pass(model), expected)
        assert manager.stats().resident_nbytes == 0
    model.fuse.where = where
    with torch.no_grad():
        if where == "forward":
            with pytest.raises(error):
                model(input_of(0))
        assert_emptied(manager, is_told=issubclass(error, Exception))
    model.fuse.where = ""
    assert_equal(train(model), train(fused(checkpointing)))


def assert_emptied(manager: OffloadManager, *, is_told: bool) -> None:
    """`is_told`: whether torch tells of such errors."""
    if not is_told:
        assert manager.stats().resident_unit_count <= 2
        manager.after_backward()
    assert manager.stats().resident_nbytes == 0


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward pre-hook": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "forward hook": lambda layer, hook: layer.register_forward_hook(hook),
    "backward pre-hook": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    "backward hook": lambda layer, hook: layer.register_full_backward_hook(hook),
    "gradient hook": lambda layer, hook: layer.weight.register_hook(hook),
    "accumulated": lambda layer, hook: layer.weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
@tiers
def test_error_of_a_users_hook_comes_out_and_leaves_nothing(
    manage: Manage, tier: str, kind: str, registered: str
) -> None:
    def hook(*_: Any) -> None:
        raise Boom

    expected, model = one_pass(fused()), fused()
    if registered == "before":
        handle = HOOKS[kind](model.middle[0], hook)
    manager = manage(model, tier=tier, trainable=tier)
    if registered == "after":
        handle = HOOKS[kind](model.middle[0], hook)
    with pytest.raises(Boom):
        one_pass(model)
    assert_emptied(manager, is_told=kind.startswith("forward"))
    handle.remove()
    assert_equal(one_pass(model), expected)
    assert manager.stats().resident_nbytes == 0


@pytest.mark.parametrize("kind", ["frozen", "trained"])
@tiers
def test_interrupted_anywhere_it_goes_on(manage: Manage, tier: str, kind: str) -> None:
    """Ctrl-C in our own code. features C5"""
    plain, model = stack(2), stack(2)
    if kind == "frozen":
        frozen(plain), frozen(model)
    expected = one_pass(plain)
    manager = manage(model, tier=tier, trainable=tier)
    one_pass(model)
    points = []
    for point in interrupted_everywhere(lambda: one_pass(model), apart=37):
        points.append(point)
        assert_equal(one_pass(model), expected)
        assert manager.stats().resident_nbytes == 0
    assert len(points) > 5
    manager.close()
    assert_equal(one_pass(model), expected)


@tiers
def test_interrupted_while_it_is_made_the_model_is_as_before(
    tmp_path: Path, tier: str
) -> None:
    plain, model = stack(2), stack(2)
    expected = one_pass(plain)
    options: dict[str, Any] = {"path": tmp_path} if tier == "nvme" else {}

    made: list[OffloadManager] = []

    def make() -> None:
        made.append(OffloadManager(model, "cpu", tier=tier, trainable=tier, **options))

    for _ in interrupted_everywhere(make, apart=211):
        assert not made
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert_equal(one_pass(model), expected)
    made[0].close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@tiers
def test_interrupt_at_a_load_leaves_nothing(manage: Manage, tier: str) -> None:
    """Also in a layer that a prefetched one follows. features G1"""
    expected, model = one_pass(stack()), stack()
    manager = manage(model, tier=tier, trainable=tier)
    one_pass(model)

    def interrupt(*_: Any) -> None:
        raise Interrupt

    for layer in model:
        handle = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupt):
            one_pass(model)
        handle.remove()
        assert_emptied(manager, is_told=False)
        assert_equal(one_pass(model), expected)
