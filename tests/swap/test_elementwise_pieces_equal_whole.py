"""Pieces stepped by ElementwiseOptimizer equal the plain torch optimizer over the whole tensor."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.elementwise import ElementwiseOptimizer

STEP_COUNT = 6
SKIPPED_STEP = 3


class Lion(Optimizer):
    """From the paper: the sign of an interpolation, decoupled decay. Its state is not updated in
    place."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                momentum = state.get("momentum", torch.zeros_like(parameter))
                direction = (beta1 * momentum + (1 - beta1) * gradient).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * direction)
                state["momentum"] = beta2 * momentum + (1 - beta2) * gradient


class Rebinding(Optimizer):
    """Gives the parameter new memory."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


optim = torch.optim
PLAIN_CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"maximize": True}),
    (optim.SGD, {}),
    (optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.2}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01, "weight_decay": 0.1}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Rprop, {}),
    (optim.ASGD, {"weight_decay": 0.1}),
    (optim.ASGD, {"t0": 2, "lambd": 0.01}),
    (Lion, {"weight_decay": 0.1}),
    (Rebinding, {}),
]
CASES = [
    (optimizer_class, {**options, **choice})
    for optimizer_class, options in PLAIN_CASES
    for choice in (
        ({}, {"fused": False})
        if "fused" in inspect.signature(optimizer_class).parameters
        else ({},)
    )
]


def label(case: object) -> str:
    if isinstance(case, type):
        return case.__name__
    assert isinstance(case, dict)
    return ",".join(f"{name}={value}" for name, value in case.items()) or "default"


def cut(numel: int, cut_numel: int) -> list[slice]:
    return [slice(start, min(start + cut_numel, numel)) for start in range(0, numel, cut_numel)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.int32), other.reshape(-1).view(torch.int32))


class Pieces:
    """One parameter stepped in pieces, its states poisoned."""

    def __init__(
        self,
        rule: ElementwiseOptimizer,
        values: Tensor,
        cuts: Sequence[slice],
        group: Mapping[str, Any],
    ) -> None:
        self.rule, self.cuts = rule, cuts
        self.master = values.clone().reshape(-1)
        self.states = {
            name: torch.full_like(self.master, torch.nan) for name in rule.states_of(group)
        }
        self.scalars: dict[str, Any] | None = None

    def step(self, gradient: Tensor, group: Mapping[str, Any]) -> None:
        flat = gradient.reshape(-1)
        results = [
            self.rule.update(
                self.master[piece],
                flat[piece].clone(),
                {name: state[piece] for name, state in self.states.items()},
                self.scalars,
                group,
            )
            for piece in self.cuts
        ]
        assert all(result == results[0] for result in results)
        self.scalars = results[0]

    def check(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        assert same_bits(parameter.detach(), self.master)
        assert set(state) == set(self.states) | set(self.scalars or ())
        for name, value in self.states.items():
            assert same_bits(state[name], value), name
        for name, value in (self.scalars or {}).items():
            assert value == state[name], name
            assert type(value) is type(state[name])


def plain(optimizer_class: type[Optimizer], params: Any, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer that the pieces must equal."""
    takes_fused = "fused" in inspect.signature(optimizer_class).parameters
    return optimizer_class(params, **{**({"fused": True} if takes_fused else {}), **options})


@pytest.fixture(scope="module")
def million() -> list[Tensor]:
    """A parameter and its gradients, step by step larger."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1_000_003, generator=generator) * 10.0 ** (step - 3)
        for step in (3, *range(STEP_COUNT))
    ]


SIZES = [(1, 4096), (37, 4096), (4096, 4096), (131_072 + 5, 3 * 4096), (131_072 + 5, 131_072)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(SIZES, id="small"),
        pytest.param([(1_000_003, 131_072)], id="large", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("optimizer_class", "options"), CASES, ids=label)
def test_pieces_of_any_size_equal_the_whole(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    sizes: list[tuple[int, int]],
    million: list[Tensor],
) -> None:
    """Else weights would depend on how the state was cut for the disk."""
    rule = ElementwiseOptimizer(optimizer_class, options)
    group = {**rule.defaults, "params": []}
    first, *gradients = million
    for numel, cut_numel in sizes:
        parameter = torch.nn.Parameter(first[:numel].clone())
        reference = plain(optimizer_class, [parameter], options)
        pieces = Pieces(rule, first[:numel], cut(numel, cut_numel), group)
        for step, gradient in enumerate(gradients):
            group["lr"] = reference.param_groups[0]["lr"] = 0.01 / (step + 1)
            if step == SKIPPED_STEP:
                continue
            parameter.grad = gradient[:numel].clone()
            reference.step()
            pieces.step(gradient[:numel], group)
        pieces.check(parameter, reference.state[parameter])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_groups_schedules_skips_and_cuts_of_any_kind_equal_the_whole(data: st.DataObject) -> None:
    """Options are those of the parameter's group at each step, whatever was stepped before."""
    optimizer_class, options = data.draw(st.sampled_from(CASES))
    rule = ElementwiseOptimizer(optimizer_class, options)
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    rows = data.draw(st.sampled_from([1, 3, 100]))
    shapes = [(rows, data.draw(st.integers(1, 300))), (data.draw(st.integers(1, 20_000)),)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in parameters]
    if "betas" in rule.defaults:
        groups[0]["betas"] = (0.8, 0.95)
    reference = plain(optimizer_class, groups, options)
    pieces = [
        Pieces(
            rule,
            parameter.detach(),
            cut(parameter.numel(), 4096 * data.draw(st.integers(1, 4))),
            group,
        )
        for parameter, group in zip(parameters, reference.param_groups, strict=True)
    ]
    for _ in range(STEP_COUNT):
        stepped = data.draw(st.lists(st.sampled_from([0, 1]), unique=True))
        for index in (0, 1):
            group, parameter = reference.param_groups[index], parameters[index]
            group["lr"] = data.draw(st.sampled_from([0.0, 1e-3, 0.1]))
            parameter.grad = None
            if index in stepped:
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.clone()
                pieces[index].step(gradient, group)
        reference.step()
    for one, parameter in zip(pieces, parameters, strict=True):
        if one.scalars is None:
            assert parameter not in reference.state or optimizer_class is optim.Adagrad
        else:
            one.check(parameter, reference.state[parameter])


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.SGD, optim.NAdam])
def test_lr_as_a_tensor_is_read_at_each_step(optimizer_class: type[Optimizer]) -> None:
    """Schedulers change it in place."""
    lr = torch.tensor(0.1)
    rule = ElementwiseOptimizer(optimizer_class, {"lr": lr})
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
    reference = plain(optimizer_class, [parameter], {"lr": lr})
    group = {**rule.defaults, "lr": lr}
    pieces = Pieces(rule, parameter.detach(), cut(5000, 4096), group)
    for step in range(3):
        lr.fill_(0.1 / (step + 1))
        parameter.grad = torch.full((5000,), 0.5)
        reference.step()
        pieces.step(parameter.grad, group)
    pieces.check(parameter, reference.state[parameter])


def test_fused_is_chosen_where_the_user_leaves_it_open() -> None:
    """Five times faster on a CPU; but what was asked for is obeyed."""
    chosen = ElementwiseOptimizer(optim.AdamW, {"foreach": None}).defaults
    assert chosen["fused"] is True
    for options in ({"fused": False}, {"foreach": False}, {"foreach": True}):
        assert not ElementwiseOptimizer(optim.AdamW, options).defaults["fused"]
    assert "fused" not in ElementwiseOptimizer(optim.Rprop, {}).defaults


def test_scalars_handed_in_are_not_changed() -> None:
    """The same ones serve every piece of the parameter, and a step that is made again."""
    rule = ElementwiseOptimizer(optim.NAdam, {})
    memory = [torch.ones(64) for _ in range(4)]
    states = {"exp_avg": memory[2], "exp_avg_sq": memory[3]}
    before = rule.update(memory[0], memory[1], states, None, rule.defaults)
    copies = {name: value.clone() for name, value in before.items()}
    after = rule.update(memory[0], memory[1], states, before, rule.defaults)
    assert before == copies
    assert after["step"] == 2


def test_memory_is_let_go_after_each_update() -> None:
    """Slots are used for other pieces, and freed."""
    rule = ElementwiseOptimizer(optim.SGD, {"momentum": 0.9})
    arrays = [torch.ones(64).numpy() for _ in range(3)]
    counts = [sys.getrefcount(array) for array in arrays]
    for scalars in (None, {}):
        master, gradient, state = map(torch.from_numpy, arrays)
        rule.update(master, gradient, {"momentum_buffer": state}, scalars, rule.defaults)
        del master, gradient, state
        assert [sys.getrefcount(array) for array in arrays] == counts


@pytest.fixture
def hooked() -> Iterator[list[Optimizer]]:
    """The optimizers for which torch's global step hooks were called."""
    calls: list[Optimizer] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer)),
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, Lion])
def test_global_step_hooks_are_not_called_for_pieces(
    optimizer_class: type[Optimizer], hooked: list[Optimizer]
) -> None:
    """They would meet an optimizer that the user never made, hundreds of times a step."""
    rule = ElementwiseOptimizer(optimizer_class, {})
    pieces = Pieces(rule, torch.ones(100), cut(100, 64), rule.defaults)
    for _ in range(2):
        pieces.step(torch.ones(100), rule.defaults)
    assert hooked == []
    outside = optimizer_class([torch.nn.Parameter(torch.ones(1))])
    outside.step() if optimizer_class is optim.AdamW else None
    assert hooked == ([outside] * 2 if optimizer_class is optim.AdamW else [])


@pytest.mark.parametrize(
    ("optimizer_class", "change", "name"),
    [
        (optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
        (optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (optim.RMSprop, {"centered": True}, "grad_avg"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_state_that_has_no_place_is_named_before_anything_changes(
    optimizer_class: type[Optimizer], change: dict[str, Any], name: str, is_first: bool
) -> None:
    """Options that are changed in a group after the layout."""
    rule = ElementwiseOptimizer(optimizer_class, {})
    pieces = Pieces(rule, torch.ones(64), cut(64, 64), rule.defaults)
    if not is_first:
        pieces.step(torch.ones(64), rule.defaults)
    before = pieces.master.clone()
    with pytest.raises(SwapUsageError, match=name):
        pieces.step(torch.ones(64), {**rule.defaults, **change})
    assert same_bits(before, pieces.master)


def test_a_state_no_longer_needed_rests() -> None:
    """As in torch; but it can't rest before it has contents."""
    on, off = {"momentum": 0.9}, {"momentum": 0.0}
    rule = ElementwiseOptimizer(optim.SGD, on)
    parameter = torch.nn.Parameter(torch.ones(64))
    reference = optim.SGD([parameter], **on, fused=True)
    pieces = Pieces(rule, parameter.detach(), cut(64, 64), rule.defaults)
    with pytest.raises(SwapUsageError, match="momentum_buffer"):
        pieces.step(torch.ones(64), {**rule.defaults, **off})
    for change in (on, off, on):
        reference.param_groups[0].update(change)
        parameter.grad = torch.ones(64)
        reference.step()
        pieces.step(torch.ones(64), {**rule.defaults, **change})
    pieces.check(parameter, reference.state[parameter])
