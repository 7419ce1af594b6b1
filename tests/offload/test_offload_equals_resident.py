"""A managed model computes and trains as the same model does unmanaged, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from nvmeswap import OffloadManager
from tests.offload.conftest import Manage
from tests.offload.runs import DIM, LEARNING_RATE, assert_equal, infer, stack, train, twins
from tests.oracle import Run

GRANULARITIES: dict[str, Any] = {"leaf": "leaf", "block": "block", "bytes": 3000}
CHECKPOINTS = ("none", "reentrant", "non-reentrant")


class Adapter(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Block(nn.Module):
    """Layers, a parameter of its own, and a buffer that each call changes."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.drop(self.down(gelu(self.up(self.norm(x))))) * self.scale


class Model(nn.Module):
    def __init__(self, kind: str, checkpointing: str) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.checkpointing = checkpointing
        if kind == "LoRA":
            self.requires_grad_(False)
            for block in self.blocks:
                block.up, block.down = Adapter(block.up), Adapter(block.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.last(x)


def build(kind: str, checkpointing: str) -> Model:
    torch.manual_seed(0)
    return Model(kind, checkpointing)


@functools.cache
def plain_run(kind: str, checkpointing: str, accumulation: int) -> Run:
    return train(build(kind, checkpointing), steps=5, accumulation=accumulation)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["LoRA", "full"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_five_steps_equal_those_of_the_unmanaged_model(
    manage: Manage, tier: str, granularity: str, kind: str, checkpointing: str, accumulation: int
) -> None:
    """features A18, A27, A35, F2, F8, F9, section 4: 1, 2, 4; field case D07, D09"""
    model = build(kind, checkpointing)
    manager = manage(
        model, tier=tier, granularity=GRANULARITIES[granularity],
        trainable="resident" if kind == "LoRA" else tier,
    )
    ours = train(model, steps=5, accumulation=accumulation)
    assert_equal(ours, plain_run(kind, checkpointing, accumulation))
    assert manager.stats().resident_unit_count == 0
    assert manager.stats().bring_count > 0


@pytest.mark.parametrize(
    "tier, trainable",
    [("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "resident"), ("cpu", "resident")],
)
def test_tiers_of_frozen_and_trained_may_differ(
    manage: Manage, tier: str, trainable: str
) -> None:
    def half_frozen() -> Model:
        model = Model("full", "none")
        model.blocks[1].requires_grad_(False)
        return model

    plain, model = twins(half_frozen)
    manage(model, tier=tier, trainable=trainable, granularity="block")
    assert_equal(train(model), train(plain))


@pytest.mark.parametrize("prefetch", [0, 3, 100])
@pytest.mark.parametrize("keep_resident_bytes", [0, 5000])
def test_how_much_is_ahead_or_kept_changes_no_number(
    manage: Manage, prefetch: int, keep_resident_bytes: int
) -> None:
    model = build("LoRA", "none")
    manage(model, prefetch=prefetch, keep_resident_bytes=keep_resident_bytes)
    assert_equal(train(model, steps=5), plain_run("LoRA", "none", 1))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTS)
def test_barrier_after_backward_changes_no_number(
    manage: Manage, tier: str, checkpointing: str
) -> None:
    """Loops of DiffSynth call it; others need not. features A19, A23, F2"""
    model = build("full", checkpointing)
    manager = manage(model, tier=tier, trainable=tier)

    def barrier() -> None:
        manager.after_backward()
        assert manager.stats().resident_unit_count == 0

    assert_equal(
        train(model, steps=5, accumulation=3, between=barrier),
        plain_run("full", checkpointing, 3),
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_optimizer_may_be_made_before_or_after(manage: Manage, tier: str, when: str) -> None:
    """Parameters stay the same objects. features A37, section 4: 22; field case D09"""
    model = build("full", "none")
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    manager = manage(model, tier=tier, trainable=tier)
    if when == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    assert_equal(train(model, steps=5, optimizer=optimizer), plain_run("full", "none", 1))
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
    manager.close()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"lr": LEARNING_RATE, "fused": True}),
        (torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("trainable", ["cpu", "nvme"])
def test_states_on_nvme_change_no_number(
    manage: Manage, tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any],
    trainable: str,
) -> None:
    plain, model = build("full", "none"), build("full", "none")
    manager = manage(model, tier="nvme", path=tmp_path, trainable=trainable)
    own = {name: value for name, value in options.items() if name != "fused"}
    ours = train(model, accumulation=2, optimizer=manager.optimizer(kind, **own))
    reference = train(plain, accumulation=2, optimizer=kind(plain.parameters(), **options))
    assert_equal(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_models_of_other_dtypes_equal(manage: Manage, tier: str, dtype: torch.dtype) -> None:
    plain, model = (build("full", "none").to(dtype) for _ in range(2))
    manage(model, tier=tier, trainable=tier)

    def cast(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return model(x.to(dtype))

    assert_equal(train(model, cast), train(plain, cast))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_evaluation_between_steps_changes_no_number(manage: Manage, tier: str) -> None:
    plain, model = build("full", "none"), build("full", "none")
    manager = manage(model, tier=tier, trainable=tier)
    for turn in range(2):
        assert_equal(train(model, steps=1), train(plain, steps=1))
        assert_equal(infer(model.eval()), infer(plain.eval()))
        assert manager.stats().resident_unit_count == 0, turn
        model.train(), plain.train()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_two_forwards_before_their_backwards_equal(manage: Manage, tier: str) -> None:
    """In order, reversed, and in one. features F4"""
    for order in ([0, 1], [1, 0], None):
        plain, model = stack(), stack()
        manager = manage(model, tier=tier, trainable=tier)
        for each in (plain, model):
            losses = [each(torch.full((2, DIM), 1.0 + n)).square().mean() for n in range(2)]
            if order is None:
                sum(losses).backward()
            else:
                for n in order:
                    losses[n].backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert manager.stats().resident_unit_count == 0


def test_two_managers_work_side_by_side(tmp_path: Path) -> None:
    """Also on one path, each in a folder of its own. features 3.2"""
    torch.manual_seed(1)
    first, second = stack(), nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(6)))
    reference = train(stack())
    with (
        OffloadManager(first, "cpu", path=tmp_path, trainable="nvme"),
        OffloadManager(second, "cpu", path=tmp_path, trainable="nvme"),
    ):
        x = torch.ones(2, DIM)
        second_before = second(x)
        assert_equal(train(first), reference)
        assert torch.equal(second(x), second_before)
        assert torch.equal(first(second(x)), first(second(x)))
