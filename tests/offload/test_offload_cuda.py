"""What only a GPU can show: the order of copies and kernels, peaks of memory, pinned memory.

Skipped where there is none: on the CPU a copy is over when it returns.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.offload import moving_structures, torch_structures
from tests.offload.conftest import Manage
from tests.offload.moving_structures import Ordered
from tests.offload.runs import (
    DIM,
    LEARNING_RATE,
    assert_equal,
    copies_of,
    frozen,
    infer,
    input_of,
    loss_of,
    place,
    train,
    twins,
)
from tests.offload.structures import STRUCTURES
from tests.offload.test_offload_reviewed_cases import Masked
from tests.oracle import Run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: streams and peaks are its own"
)
assert moving_structures and torch_structures
tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
SPIN_CYCLES = 3_000_000  # about 2 ms
WIDE = 1024
UNIT_NBYTES = 4 * WIDE * WIDE


@pytest.fixture(autouse=True)
def reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Any hook on a module makes torch's attention take its slow path, which rounds otherwise.
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.use_deterministic_algorithms(False)


def wide(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))


class OnTheHost:
    """A plain model's optimizer where a managed one has it: on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        there = [each for each in model.parameters() if each.requires_grad]
        hosts = [each.requires_grad_() for each in copies_of(there, "cpu")]
        self.pairs = list(zip(hosts, there, strict=True))
        self.inner = torch.optim.AdamW(hosts, lr=LEARNING_RATE) if hosts else None

    def zero_grad(self) -> None:
        for _, there in self.pairs:
            there.grad = None

    def step(self) -> None:
        for host, there in self.pairs:
            host.grad = None if there.grad is None else there.grad.cpu()
        if self.inner is not None:
            self.inner.step()
        with torch.no_grad():
            for host, there in self.pairs:
                there.copy_(host)


def train_plain(model: nn.Module, **options: Any) -> Run:
    place(model, "cuda")
    return train(model, optimizer=OnTheHost(model), device="cuda", **options)


def train_managed(model: nn.Module, **options: Any) -> Run:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE) if trained else None
    return train(model, optimizer=optimizer, device="cuda", **options)


def on_gpu(forward: Any) -> Any:
    return lambda model, x, number: forward(model, x.cuda(), number)


# --- every structure -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", STRUCTURES)
@tiers
def test_structures_trained(manage: Manage, tier: str, name: str) -> None:
    """Placed wrong, a tensor would be on another device than the rest. features 2A, 3.2"""
    case = STRUCTURES[name]
    if case.frozen_only:
        pytest.skip("its parameters can't be updated, managed or not")
    plain, model = twins(case.build)
    manager = manage(model, "cuda", tier=tier, trainable=tier)
    assert_equal(train_managed(model, forward=case.call), train_plain(plain, forward=case.call))
    assert manager.stats().resident_unit_count == 0
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.grad is None or parameter.grad.device.type == "cpu"


@pytest.mark.parametrize("name", STRUCTURES)
@tiers
def test_structures_frozen(manage: Manage, tier: str, name: str) -> None:
    case = STRUCTURES[name]
    plain, model = (frozen(each).eval() for each in twins(case.build))
    manager = manage(model, "cuda", tier=tier)
    place(plain, "cuda")
    assert_equal(infer(model, on_gpu(case.call)), infer(plain, on_gpu(case.call)))
    assert manager.stats().resident_unit_count == 0


# --- order of copies and kernels -----------------------------------------------------------------


class Spins(nn.Module):
    """Keeps the GPU busy, so that all that follows is only queued."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SPIN_CYCLES)
        return x


class SpinsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(SPIN_CYCLES)
        return grad


def poison(*_: Any) -> None:
    """Whoever freed memory too early finds this in it."""
    for _ in range(3):
        torch.full((WIDE, WIDE), float("nan"), device="cuda")


def spinning(layers: int = 6) -> nn.Sequential:
    parts: list[nn.Module] = []
    for layer in wide(layers):
        parts += [Spins(), layer]
    return nn.Sequential(*parts)


@tiers
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_memory_is_not_filled_again_before_its_last_reader(
    manage: Manage, tier: str, prefetch: int
) -> None:
    """field case D02, D03; section 4: 18"""
    model = frozen(spinning())
    x = torch.randn(8, WIDE, device="cuda")
    expected = copy.deepcopy(model).cuda()(x)
    manage(model, "cuda", tier=tier, prefetch=prefetch, buffer_count=2)
    for layer in model:
        layer.register_forward_hook(poison)
    with torch.no_grad():
        outputs = [model(x) for _ in range(20)]
    assert all(torch.equal(output, expected) for output in outputs)


@tiers
def test_a_stream_of_the_users_is_waited_for(manage: Manage, tier: str) -> None:
    """Another one each time. field case D04"""
    model = frozen(spinning())
    x = torch.randn(8, WIDE, device="cuda")
    expected = copy.deepcopy(model).cuda()(x)
    manage(model, "cuda", tier=tier)
    torch.cuda.synchronize()
    outputs = []
    for _ in range(6):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            outputs.append(model(x))
            poison()
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


@tiers
def test_gradients_and_updates_are_in_order(manage: Manage, tier: str) -> None:
    """A gradient is on the host before the optimizer reads it; an edit there is copied after."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SpinsInBackward.apply(super().forward(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDE, WIDE, bias=False) for _ in range(4)))
    plain = copy.deepcopy(model)
    manage(model, "cuda", tier=tier, trainable=tier)

    def forward(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return model(x.flatten().repeat(5)[:WIDE])

    assert_equal(
        train_managed(model, forward=forward, accumulation=2),
        train_plain(plain, forward=forward, accumulation=2),
    )


@tiers
def test_host_memory_is_not_changed_under_a_copy(manage: Manage, tier: str) -> None:
    """An edit between two calls that are both only queued. field case D05, D06"""
    model = frozen(wide(3))
    manage(model, "cuda", tier=tier, buffer_count=1)
    x = torch.ones(1, WIDE, device="cuda")
    plain = copy.deepcopy(model).cuda()
    outputs, expected = [], []
    for _ in range(5):
        torch.cuda._sleep(SPIN_CYCLES)
        with torch.no_grad():
            outputs.append(model(x))
            expected.append(plain(x))
            for layer in (*model, *plain):
                layer.weight.mul_(1.5)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


@tiers
@pytest.mark.parametrize("accumulation", [1, 3])
def test_repeated_modules_train_exactly(manage: Manage, tier: str, accumulation: int) -> None:
    def forward(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        return model(x, [0, 1, 0, 2, 0, 1])

    plain, model = twins(Ordered)
    manage(model, "cuda", tier=tier, trainable=tier)
    assert_equal(
        train_managed(model, forward=forward, accumulation=accumulation),
        train_plain(plain, forward=forward, accumulation=accumulation),
    )


@tiers
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_is_exact(manage: Manage, tier: str, reentrant: bool) -> None:
    """field case D07, D08"""

    def forward(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    plain, model = twins(Ordered)
    manage(model, "cuda", tier=tier, trainable=tier)
    assert_equal(train_managed(model, forward=forward), train_plain(plain, forward=forward))


# --- torch's features ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_compiled(manage: Manage, backend: str, what: str) -> None:
    """field case C08"""
    torch._dynamo.reset()
    model = wide(3)
    plain = copy.deepcopy(model).cuda()
    manage(model, "cuda", tier="cpu", trainable="cpu")
    compiled: Any = model
    if what == "whole":
        compiled = torch.compile(model, backend=backend)
    else:
        for index in range(3):
            model[index] = torch.compile(model[index], backend=backend)
    x = torch.randn(4, WIDE, device="cuda")
    for _ in range(3):
        ours, theirs = compiled(x), plain(x)
        torch.testing.assert_close(ours, theirs)
        loss_of(ours).backward()
        loss_of(theirs).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad.cpu())


@tiers
def test_inputs_of_the_outermost_call_are_moved(manage: Manage, tier: str) -> None:
    model = frozen(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    expected = copy.deepcopy(model).cuda()
    manage(model, "cuda", tier=tier)
    assert torch.equal(model(input_of(0)), expected(input_of(0).cuda()))


def test_what_is_always_on_the_device_shares_memory_there_and_after_close(manage: Manage) -> None:
    both = torch.randn(2 * DIM, DIM)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    for layer, values in zip(model, both.split(DIM), strict=True):
        layer.weight = nn.Parameter(values)
    manager = manage(model, "cuda", tier="cpu", trainable="resident")
    for device in ("cuda", "cpu"):
        assert [each.device.type for each in model.parameters()] == [device] * 4
        storages = {layer.weight.untyped_storage().data_ptr() for layer in model}
        assert len(storages) == 1
        assert torch.equal(torch.cat([layer.weight for layer in model]).cpu(), both)
        manager.close()


def test_buffer_made_on_the_host_in_inference_mode_moves(manage: Manage) -> None:
    model = frozen(Masked())
    manage(model, "cuda", tier="cpu")
    x = torch.randn(5, DIM)
    with torch.inference_mode():
        model(x[:1])
        model.mask = torch.full((5, 1), 0.5)
        numbers = model(x)
    assert model.mask.is_cuda
    with torch.no_grad():
        assert torch.equal(model(x), numbers)
