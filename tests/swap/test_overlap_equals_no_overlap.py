"""Updating during backward gives the values of updating after it; what can't be is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer

WIDTH = 96


class Model(nn.Module):
    """A module used twice, one that is used in every other step, one never, a scalar, and bf16."""

    def __init__(self, *, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self._checkpointed = checkpointed
        self.fails = False

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.shared(self.first(x).tanh()).tanh()
        if step % 2:
            x = self.sometimes(x)
        if self._checkpointed:
            x = checkpoint(
                self._second_use, x, use_reentrant=self._checkpointed == "reentrant"
            )
        else:
            x = self._second_use(x)
        if self.fails:
            x = Fails.apply(x)
        return self.low(x.bfloat16()).float() * self.scale

    def _second_use(self, x: Tensor) -> Tensor:
        return self.shared(x).tanh()


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def backward(model: Model, step: int, micro_batch: int = 0) -> None:
    generator = torch.Generator().manual_seed(step * 10 + micro_batch)
    x = torch.randn(4, WIDTH, generator=generator)
    model(x, step).square().mean().backward()


def clip_each(model: Model, norm: float) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], norm)


Make = Callable[..., tuple[Model, SwappedOptimizer]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Models, all alike, each with an optimizer of its own."""
    made: list[SwappedOptimizer] = []

    def build(
        overlap: OverlapSettings | None = None, checkpointed: str = ""
    ) -> tuple[Model, SwappedOptimizer]:
        model = Model(checkpointed=checkpointed)
        optimizer = SwappedOptimizer(
            torch.optim.AdamW, model.parameters(), lr=1e-2, nvme_path=tmp_path, pin_memory=False,
            sub_group_size=4096, overlap=overlap,
        )
        made.append(optimizer)
        return model, optimizer

    yield build
    for optimizer in made:
        optimizer.close()


def assert_same(model: Model, reference: Model) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpointed", ["", "not reentrant"])
def test_overlapped_run_equals_a_plain_one(
    make: Make, accumulation: int, clip_norm: float | None, checkpointed: str
) -> None:
    """Else the faster run is another one. The last steps have fewer passes than were told."""
    model, swapped = make(OverlapSettings(accumulation, clip_norm), checkpointed)
    reference = Model()
    plain = torch.optim.AdamW(
        [p for p in reference.parameters() if p.dtype is torch.float32], lr=1e-2, fused=True
    )
    low = [p for p in reference.parameters() if p.dtype is not torch.float32]
    masters = [p.detach().float().requires_grad_() for p in low]
    plain.add_param_group({"params": masters})
    for step in range(6):
        passes = accumulation if step < 5 else max(1, accumulation - 1)
        for micro_batch in range(passes):
            # The module that is used sometimes misses in the last pass: its gradient is there.
            odd = step + (micro_batch == passes - 1)
            backward(model, odd, micro_batch)
            backward(reference, odd, micro_batch)
        if clip_norm is not None:
            clip_each(reference, clip_norm)
        for parameter, master in zip(low, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        plain.step()
        with torch.no_grad():
            for parameter, master in zip(low, masters, strict=True):
                parameter.copy_(master)
        swapped.step()
        for each in (swapped, plain):
            each.zero_grad()
        for parameter in low:
            parameter.grad = None
        assert_same(model, reference)
    assert swapped.stats().step_count == 6
    assert swapped.read_state(model.never.weight, "exp_avg").count_nonzero() == 0


def run(model: Model, optimizer: SwappedOptimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def restored(
    model: Model, optimizer: SwappedOptimizer, saved: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()


def checkpoint_of(
    model: Model, optimizer: SwappedOptimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def second_backward(model: Model) -> None:
    backward(model, 2)
    backward(model, 2, 1)


def reentrant_backward(model: Model) -> None:
    model._checkpointed = "reentrant"
    try:
        backward(model, 2)
    finally:
        model._checkpointed = ""


@pytest.mark.parametrize("too_late", [second_backward, reentrant_backward])
def test_gradient_that_comes_too_late_is_refused_until_a_checkpoint_is_loaded(
    make: Make, too_late: Callable[[Model], None]
) -> None:
    """Half of it would be in the parameters, the other half lost."""
    model, optimizer = make(OverlapSettings())
    run(model, optimizer, range(2))
    saved = checkpoint_of(model, optimizer)
    with pytest.raises(SwapUsageError, match="after its update had begun"):
        too_late(model)
    for refused in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(SwapUsageError):
            refused()
    restored(model, optimizer, saved)
    run(model, optimizer, range(2, 4))
    reference, other = make()
    run(reference, other, range(4))
    assert_same(model, reference)


def test_backward_that_failed_is_stepped_as_far_as_it_came(make: Make) -> None:
    """As torch would. Or a checkpoint is loaded; forgetting the gradients alone is refused."""
    runs = []
    for overlap in (OverlapSettings(), None):
        model, optimizer = make(overlap)
        run(model, optimizer, range(2))
        saved = checkpoint_of(model, optimizer)
        model.fails = True
        with pytest.raises(RuntimeError, match="in backward"):
            backward(model, 2)
        model.fails = False
        if overlap is not None:
            with pytest.raises(SwapUsageError, match="half-way"):
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        runs.append((model, optimizer, saved))
    assert_same(runs[0][0], runs[1][0])
    for model, optimizer, saved in runs:
        restored(model, optimizer, saved)
        run(model, optimizer, range(2, 4))
    reference, other = make()
    run(reference, other, range(4))
    assert_same(runs[0][0], reference)
    assert_same(runs[1][0], reference)


def test_backward_that_failed_before_the_last_pass_is_forgotten_with_its_gradients(
    make: Make,
) -> None:
    """It must not be counted: the updates would begin a micro-batch too early."""
    model, optimizer = make(OverlapSettings(gradient_accumulation_steps=2))
    reference, other = make()
    for step in range(3):
        model.fails = True
        with pytest.raises(RuntimeError, match="in backward"):
            backward(model, step)
        model.fails = False
        optimizer.zero_grad()
        for micro_batch in range(2):
            backward(model, step, micro_batch)
            backward(reference, step, micro_batch)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        assert_same(model, reference)


def test_odd_orders_of_calls(make: Make) -> None:
    """A step without backward does nothing; gradients in use are not forgotten; step() once."""
    model, optimizer = make(OverlapSettings())
    reference, other = make()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state_dict()["state"] == {}
    run(model, optimizer, range(2))
    run(reference, other, range(2))
    assert_same(model, reference)
    backward(model, 2)
    refused: list[Callable[[], Any]] = [
        optimizer.zero_grad, optimizer.state_dict,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    ]
    for each in refused:
        with pytest.raises(SwapUsageError):
            each()
    optimizer.step()
    backward(reference, 2)
    other.step()
    assert_same(model, reference)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_close_in_the_middle_ends_it(make: Make) -> None:
    """Else a thread would go on to write into memory that is given back."""
    model, optimizer = make(OverlapSettings())
    run(model, optimizer, range(1))
    backward(model, 1)
    optimizer.close()
    with pytest.raises(SwapUsageError, match="closed"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 2)  # of a model that nothing listens to any more
    assert model.first.weight.grad is not None


def test_group_added_later_overlaps_too(make: Make) -> None:
    """Its hooks are its own."""
    model, optimizer = make(OverlapSettings())
    reference, other = make()
    for each, its in ((model, optimizer), (reference, other)):
        run(each, its, range(1))
        each.late = nn.Parameter(torch.ones(5000))
        its.add_param_group({"params": [each.late], "lr": 0.1})
        for _ in range(2):
            each.late.square().sum().backward()
            its.step()
            its.zero_grad()
        run(each, its, range(3))
    assert_same(model, reference)


def test_grad_scaler_is_refused(make: Make) -> None:
    """It looks at the gradients when parameters have been updated with them."""
    model, optimizer = make(OverlapSettings())
    run(model, optimizer, range(1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, WIDTH), 0).sum()).backward()
    with pytest.raises(SwapUsageError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(SwapUsageError):
        optimizer.step()


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 0}, {"clip_norm": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SwapConfigError):
        OverlapSettings(**options)
