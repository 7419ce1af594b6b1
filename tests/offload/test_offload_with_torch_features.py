"""What torch can do with a plain model it can do with a managed one, with the same numbers."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from nvmeswap import OffloadManager, SwapError
from tests.offload import moving_structures, torch_structures
from tests.offload.blocks import Blocks, Managed, assert_same_gradients, block
from tests.offload.conftest import Manage
from tests.offload.runs import (
    DIM,
    assert_equal,
    call,
    collect,
    forward_and_backward,
    frozen,
    infer,
    input_of,
    stack,
    train,
    twins,
    weights_of,
)
from tests.offload.structures import STRUCTURES
from tests.oracle import Run

assert moving_structures and torch_structures  # they add their own
tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])


# --- precision and compilation -------------------------------------------------------------------


@tiers
@pytest.mark.parametrize("around", ["forward", "step"])
def test_autocast(pair: Managed, tier: str, around: str) -> None:
    """features F18"""
    plain, model, manager = pair(tier=tier)

    def under_autocast(model: nn.Module, x: torch.Tensor, number: int) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x) + model(x * 2)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "step"):
        assert_equal(train(model, under_autocast), train(plain, under_autocast))
    assert manager.stats().resident_nbytes == 0


@tiers
def test_autocast_over_a_frozen_model(manage: Manage, tier: str) -> None:
    """Its cache of cast weights is of the values that are there. features F18"""
    plain, model = (frozen(each) for each in twins(Blocks))
    manager = manage(model, tier=tier)
    x = input_of(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        ours = [model(x) for _ in range(3)]
        torch.manual_seed(0)
        theirs = [plain(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert manager.stats().resident_nbytes == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_compiled_by_the_eager_backend(
    manage: Manage, what: str, when: str, tier: str = "nvme"
) -> None:
    """features C8, 2A ok, section 4: 23; field case C08"""
    torch._dynamo.reset()
    plain, model = twins(lambda: Blocks().eval())

    def compile_it() -> Callable[[torch.Tensor], torch.Tensor]:
        if what == "whole":
            return torch.compile(model, backend="eager")
        for index, each in enumerate(model.blocks):
            model.blocks[index] = torch.compile(each, backend="eager")
        return model

    compiled: Any = compile_it() if when == "before" else None
    manager = manage(model, tier=tier, trainable=tier, granularity="leaf")
    if compiled is None:
        compiled = compile_it()
    for number in range(3):
        ours = forward_and_backward(compiled, call, number)
        theirs = forward_and_backward(plain, call, number)
        assert_equal(Run([], ours), Run([], theirs))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert manager.stats().resident_nbytes == 0


@pytest.mark.parametrize("what, backend", [("blocks", "inductor"), ("whole", "aot_eager")])
def test_compiled_by_other_backends(manage: Manage, what: str, backend: str) -> None:
    """As near as they are by themselves. field case C08"""
    torch._dynamo.reset()
    plain, model = twins(lambda: nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2))))
    manager = manage(model, tier="cpu", trainable="cpu", granularity="leaf")
    compiled: Any = model
    if what == "whole":
        compiled = torch.compile(model, backend=backend)
    else:
        for index in range(2):
            model[index] = torch.compile(model[index], backend=backend)
    for number in range(3):
        ours = forward_and_backward(compiled, call, number)
        for name, number_plain in forward_and_backward(plain, call, number).items():
            torch.testing.assert_close(ours[name], number_plain)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert manager.stats().resident_nbytes == 0


def test_nothing_is_compiled_again_once_warm(manage: Manage) -> None:
    """field case C08"""
    torch._dynamo.reset()
    model = nn.Sequential(*(block() for _ in range(4))).eval()
    manage(model, tier="cpu", trainable="cpu", granularity="block")
    compiled = torch.compile(model, backend="eager")
    for number in range(3):
        forward_and_backward(compiled, call, number)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(3):
            forward_and_backward(compiled, call, number)


# --- calls of other kinds ------------------------------------------------------------------------


@tiers
def test_inference_mode(pair: Managed, tier: str) -> None:
    """And training after it, and a manager made in it."""
    plain, model, manager = pair(lambda: Blocks().eval(), tier=tier)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(input_of(0)), plain(input_of(0)))
    assert manager.stats().resident_nbytes == 0
    assert_equal(train(model), train(plain))
    with torch.inference_mode():
        assert torch.equal(model(input_of(0)), plain(input_of(0)))
    assert_equal(train(model), train(plain))


@tiers
def test_made_in_inference_mode(manage: Manage, tier: str) -> None:
    plain, model = twins(lambda: Blocks().eval())
    with torch.inference_mode():
        manager = manage(model, tier=tier, trainable=tier)
        assert torch.equal(model(input_of(0)), plain(input_of(0)))
    assert_equal(train(model), train(plain))
    manager.close()
    assert_equal(train(model), train(plain))


@tiers
def test_functional_call_uses_what_it_is_given(pair: Managed, tier: str) -> None:
    plain, model, manager = pair(stack, tier=tier)
    given = {f"{index}.weight": torch.eye(DIM) * index for index in (0, 3)}
    ours, theirs = (functional_call(each, given, (input_of(0),)) for each in (model, plain))
    assert torch.equal(ours, theirs)
    sum_ours, sum_theirs = ours.sum(), theirs.sum()
    sum_ours.backward(), sum_theirs.backward()
    assert_same_gradients(model, plain)
    assert torch.equal(model(input_of(1)), plain(input_of(1)))
    forward_and_backward(model, call, 2), forward_and_backward(plain, call, 2)
    assert_same_gradients(model, plain)
    assert manager.stats().resident_nbytes == 0


def test_torch_func_works_or_says_so(pair: Managed) -> None:
    """Its transforms forbid hooks on saved tensors."""
    plain, model, manager = pair(stack)

    def loss(model: nn.Module) -> Callable[..., torch.Tensor]:
        def of(given: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, given, (x,)).square().sum()

        return of

    given = {name: p.detach().clone() for name, p in plain.named_parameters()}
    expected = vmap(grad(loss(plain)), in_dims=(None, 0))(given, input_of(0))
    try:
        ours = vmap(grad(loss(model)), in_dims=(None, 0))(given, input_of(0))
    except SwapError as error:
        assert error.fix
    else:
        for name, each in expected.items():
            torch.testing.assert_close(ours[name], each)
    assert manager.stats().resident_nbytes == 0
    assert_equal(train(model), train(plain))


@tiers
@pytest.mark.parametrize("registered", ["before", "after"])
def test_users_hooks_see_the_weights(manage: Manage, tier: str, registered: str) -> None:
    """In each of them the unit is there, with real values. features F21"""

    def add_hooks(model: nn.Module, seen: list[torch.Tensor]) -> None:
        def see(module: nn.Module, *_: Any) -> None:
            seen.append(module.weight.detach().clone())

        for layer in model:
            layer.register_forward_pre_hook(see)
            layer.register_forward_hook(see)
            layer.register_full_backward_pre_hook(see)
            layer.register_full_backward_hook(see)

    plain, model = stack(), stack()
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    add_hooks(plain, theirs)
    if registered == "before":
        add_hooks(model, ours)
    manage(model, tier=tier, trainable=tier)
    if registered == "after":
        add_hooks(model, ours)
    assert_equal(train(model), train(plain))
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@tiers
def test_users_hooks_may_change_inputs_outputs_and_gradients(pair: Managed, tier: str) -> None:
    plain, model, _ = pair(stack, tier=tier)
    for each in (plain, model):
        each[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
        each[1].register_forward_hook(lambda _, inputs, output: output + 1)
        each[2].register_full_backward_hook(lambda _, grads, outs: (grads[0] * 3,))
        each[3].weight.register_hook(lambda gradient: gradient * 0.5)
        each[4].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        each.register_forward_hook(lambda _, args, kwargs, out: out * 2, with_kwargs=True)
    assert_equal(train(model), train(plain))


@tiers
def test_forward_that_the_user_replaces(pair: Managed, tier: str) -> None:
    plain, model, _ = pair(stack, tier=tier)
    for each in (plain, model):
        layer = each[2]
        layer.forward = lambda x, layer=layer: x @ layer.weight - layer.bias
    assert_equal(train(model), train(plain))


# --- the manager's end ---------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(value) for module in model.modules() for name, value in sorted(vars(module).items())
        if "hooks" in name and hasattr(value, "__len__")
    ]


@tiers
@pytest.mark.parametrize("name", ["TiedByParameter", "buffers_in_blocks", "strided", "lstm",
                                  "channels_last", "Attention"])
def test_close_leaves_the_model_as_it_was(manage: Manage, tier: str, name: str) -> None:
    """Types, hooks, attributes, tensors. features A3, C9, section 4: 21"""
    case = STRUCTURES[name]
    plain, model = twins(case.build)
    attributes = [sorted(vars(module)) for module in model.modules()]
    kinds = [type(module) for module in model.modules()]
    before, hooks = dict(model.named_parameters()), hooks_of(model)
    manager = manage(model, tier=tier, trainable=tier)
    assert_equal(train(model, case.call), train(plain, case.call))
    manager.close()
    assert hooks_of(model) == hooks
    assert [type(module) for module in model.modules()] == kinds
    if not name.startswith("buffers"):
        assert [sorted(vars(module)) for module in model.modules()] == attributes
    for key, parameter in model.named_parameters():
        assert parameter is before[key] and type(parameter) is nn.Parameter
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
    assert weights_of(model).keys() == weights_of(plain).keys()
    assert_equal(train(model, case.call), train(plain, case.call))


def test_closed_manager_holds_no_model_and_the_model_no_manager(tmp_path: Path) -> None:
    """features C9, section 4: 21"""
    model = stack()
    with OffloadManager(model, "cpu", path=tmp_path, trainable="nvme") as manager:
        train(model, steps=1)
    gone = weakref.ref(manager)
    del manager
    collect()
    assert gone() is None
    with OffloadManager(model, "cpu", tier="cpu", trainable="cpu"):
        train(model, steps=1)
    forgotten = weakref.ref(model)
    del model
    collect()
    assert forgotten() is None


def test_forgotten_manager_leaves_no_memory_behind(tmp_path: Path) -> None:
    model = stack()
    manager = OffloadManager(model, "cpu", path=tmp_path, trainable="nvme")
    model(input_of(0)).sum().backward()
    forgotten = [weakref.ref(manager), weakref.ref(model), weakref.ref(model[0].weight)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del model, manager
        collect()
    assert [each() for each in forgotten] == [None] * 3


@tiers
def test_copy_trains_while_the_original_is_managed(pair: Managed, tier: str) -> None:
    """As an average of weights is kept."""
    plain, model, manager = pair(stack, tier=tier)
    average = copy.deepcopy(model)
    train(model), train(plain)
    with torch.no_grad():
        for a, b in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 0.5)
    expected = stack()
    with torch.no_grad():
        for a, b in zip(expected.parameters(), plain.parameters(), strict=True):
            a.lerp_(b, 0.5)
    assert_equal(infer(average), infer(expected))
    assert manager.stats().resident_nbytes == 0
