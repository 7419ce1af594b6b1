"""Autograd and checkpoints, used in any way, give a managed model the numbers of a plain one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from nvmeswap import SwapError
from tests.offload.blocks import Blocks, Managed, assert_same_gradients
from tests.offload.conftest import Manage
from tests.offload.runs import (
    assert_equal,
    call,
    forward_and_backward,
    frozen,
    input_of,
    stack,
    train,
    twins,
)

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])


@tiers
def test_graph_retained_for_a_second_backward(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(tier=tier)
    for each in (plain, model):
        torch.manual_seed(0)
        loss = each(input_of(0)).square().mean()
        loss.backward(retain_graph=True)
        assert manager.stats().resident_nbytes == 0
        loss.backward()
    assert_same_gradients(model, plain)
    assert manager.stats().resident_nbytes == 0


@tiers
def test_gradients_of_gradients(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(stack, tier=tier)
    for each in (plain, model):
        x = input_of(0).requires_grad_()
        (slope,) = torch.autograd.grad(each(x).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert_same_gradients(model, plain)
    assert manager.stats().resident_nbytes == 0


@tiers
def test_gradients_asked_for_one_by_one(pair: Managed, tier: str) -> None:
    """They are returned and not put on the parameters."""
    plain, model, manager = pair(tier=tier)
    asked = []
    for each in (plain, model):
        torch.manual_seed(0)
        x = input_of(0).requires_grad_()
        wanted = [x, each.blocks[1][0].weight, each.norm.bias]
        asked.append(torch.autograd.grad(each(x).square().sum(), wanted))
        assert all(parameter.grad is None for parameter in each.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*asked, strict=True))
    assert manager.stats().resident_nbytes == 0


@tiers
def test_backward_to_some_inputs_only(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(tier=tier)
    for each in (plain, model):
        torch.manual_seed(0)
        loss = each(input_of(0)).square().sum()
        loss.backward(inputs=[each.blocks[0][0].weight, each.blocks[2][2].bias])
    assert_same_gradients(model, plain)
    assert manager.stats().resident_nbytes == 0


@tiers
def test_backward_of_a_part(pair: Managed, tier: str) -> None:
    """Of one block's output, of a graph that another backward goes through, and never."""
    plain, model, manager = pair(stack, tier=tier)
    for each in (plain, model):
        middle = each[1](each[0](input_of(0)))
        end = each[3](each[2](middle))
        forgotten = each(input_of(1))
        middle.sum().backward(retain_graph=True)
        end.sum().backward()
        del forgotten
    gc.collect()
    assert_same_gradients(model, plain)
    forward_and_backward(model, call, 2), forward_and_backward(plain, call, 2)
    assert_same_gradients(model, plain)
    assert manager.stats().resident_nbytes == 0


@tiers
@pytest.mark.parametrize("place", ["outside", "inside", "both"])
def test_users_hooks_on_saved_tensors_see_all_and_get_them_back(
    pair: Managed, tier: str, place: str
) -> None:
    def hooks(count: list[int]) -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
            count[0] += 1
            return "packed", tensor.clone()

        def unpack(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
            assert packed[0] == "packed"
            count[1] += 1
            return packed[1]

        return saved_tensors_hooks(pack, unpack)

    def run(count: list[int]) -> Callable[..., torch.Tensor]:
        def inside(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with hooks(count) if place != "outside" else contextlib.nullcontext():
                return block(x)

        return inside

    plain, model, manager = pair(Blocks, tier=tier)
    counts = {"plain": [0, 0], "model": [0, 0]}
    for name, each in (("plain", plain), ("model", model)):
        each.run = run(counts[name])
        with hooks(counts[name]) if place != "inside" else contextlib.nullcontext():
            forward_and_backward(each, call, 0)
    assert_same_gradients(model, plain)
    assert counts["model"] == counts["plain"]
    assert manager.stats().resident_nbytes == 0


@tiers
def test_activations_saved_on_the_cpu(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(tier=tier)
    with save_on_cpu():
        assert_equal(train(model), train(plain))
    assert manager.stats().resident_nbytes == 0


@tiers
def test_hooks_on_saved_tensors_may_be_forbidden(
    pair: Managed, tier: str
) -> None:
    """torch lets a user forbid them, and says why: so do we, or the numbers are right."""
    plain, model, manager = pair(stack, tier=tier)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        try:
            ours = model(input_of(0))
        except RuntimeError as error:
            assert "not here" in str(error)
        except SwapError as error:
            assert error.fix
        else:
            assert torch.equal(ours, plain(input_of(0)))
    assert manager.stats().resident_nbytes == 0
    assert_equal(train(model), train(plain))


# --- checkpointing -------------------------------------------------------------------------------


def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def half(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block[2], block[1](block[0](x)), use_reentrant=False)

    return checkpoint(half, x, use_reentrant=False)


def reentrant_in_the_other(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def half(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block[2], block[1](block[0](x)), use_reentrant=False)

    return checkpoint(half, x, use_reentrant=True)


def repeated(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return block(block(x))

    return checkpoint(twice, x, use_reentrant=False)


def debugged(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, determinism_check="default")


@tiers
@pytest.mark.parametrize("kind", ["frozen", "trained"])
@pytest.mark.parametrize("run", [nested, reentrant_in_the_other, repeated, debugged])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpoints_of_all_kinds(
    manage: Manage, tier: str, run: Any, early_stop: bool, kind: str
) -> None:
    """features A18, 2E; field case D08, D12"""
    plain, model = twins(lambda: Blocks(run))
    if kind == "frozen":
        frozen(plain), frozen(model)
    manager = manage(model, tier=tier, trainable=tier)
    with set_checkpoint_early_stop(early_stop):
        assert_equal(train(model), train(plain))
    assert manager.stats().resident_nbytes == 0
    assert manager.stats().peak_resident_unit_count <= 2


@tiers
def test_whole_model_in_one_checkpoint_and_in_segments(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(stack, tier=tier)

    def whole(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=number % 2 == 0)

    def segments(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return checkpoint_sequential(model, 3, x, use_reentrant=number % 2 == 0)

    for forward in (whole, segments):
        assert_equal(train(model, forward), train(plain, forward))
        assert manager.stats().resident_nbytes == 0


@tiers
def test_recomputed_numbers_are_those_of_the_first_time(manage: Manage, tier: str) -> None:
    """field case D08"""
    seen: list[torch.Tensor] = []

    def noted(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            y = block(x)
            seen.append(y.detach().clone())
            return y

        return checkpoint(body, x, use_reentrant=True)

    _, model = twins(lambda: Blocks(noted))
    manage(model, tier=tier, trainable=tier)
    forward_and_backward(model, call, 0)
    forward, recomputed = seen[:3], seen[3:]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(recomputed), strict=True))
