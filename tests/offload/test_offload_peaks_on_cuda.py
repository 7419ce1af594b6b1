"""What offloaded models take of a GPU's memory, at most and in the end.

Skipped where there is none.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager
from tests.offload.conftest import Manage
from tests.offload.runs import frozen

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: peaks are its own"
)
tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
WIDE = 1024
UNIT_NBYTES = 4 * WIDE * WIDE


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield


def wide(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))


def peak_nbytes(call: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@tiers
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_peak_is_the_window(manage: Manage, tier: str, prefetch: int) -> None:
    """features A1, A2, F1, F4"""
    base_nbytes = torch.cuda.memory_allocated()
    model = frozen(wide())
    manage(model, "cuda", tier=tier, prefetch=prefetch)
    x = torch.randn(4, WIDE, device="cuda").requires_grad_()
    model(x).sum().backward()  # and cuBLAS takes its workspace
    slack = 1 << 20
    for call in (lambda: model(x).sum().backward(), lambda: infer_once(model, x)):
        assert peak_nbytes(call) <= (prefetch + 1) * UNIT_NBYTES + slack
        gc.collect()
        # cuBLAS takes 32 MiB for each thread, and backward has one of its own.
        assert torch.cuda.memory_allocated() < base_nbytes + UNIT_NBYTES + (72 << 20)


def infer_once(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


@tiers
def test_gradients_leave_as_they_are_produced(manage: Manage, tier: str) -> None:
    """Those under 32 MiB together may be on their way. features F9, F19, section 4: 4"""
    model = wide(24)
    manage(model, "cuda", tier=tier, trainable=tier, prefetch=1)
    x = torch.randn(4, WIDE, device="cuda")

    def step() -> None:
        model(x).sum().backward()

    step()
    assert peak_nbytes(step) <= 5 * UNIT_NBYTES + (33 << 20)
    for layer in model:
        assert layer.weight.grad is not None and layer.weight.grad.device.type == "cpu"


def test_toy_trains_below_its_peak(manage: Manage) -> None:
    """Ten layers, a norm, a residual, an optimizer on the host. features A38, M1"""
    torch.manual_seed(0)

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + nn.functional.layer_norm(layer(x), (WIDE,))
            return x

    model = Toy()
    manage(model, "cuda", tier="cpu", trainable="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(128, WIDE, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    activations = 10 * 4 * x.nbytes
    assert peak_nbytes(step) <= activations + 5 * UNIT_NBYTES + (32 << 20)


def test_host_memory_is_pinned_and_not_rounded_up(manage: Manage) -> None:
    """features A10, A11, F17"""
    torch.manual_seed(0)
    model = frozen(nn.Sequential(*(nn.Linear(333, 333, bias=False) for _ in range(300))))
    manager = manage(model, "cuda", tier="cpu", granularity=1 << 20)
    assert all(parameter.is_pinned() for parameter in model.parameters())
    assert manager.stats().host_nbytes <= 1.02 * 300 * 4 * 333 * 333 + 256 * 300
    manager.close()
    manager = manage(model, "cuda", tier="cpu", pin_memory=False)
    assert not any(parameter.is_pinned() for parameter in model.parameters())


@tiers
def test_autocast_keeps_no_copies(manage: Manage, tier: str) -> None:
    """features F18"""
    model = frozen(wide())
    manage(model, "cuda", tier=tier)
    x = torch.randn(4, WIDE, device="cuda")
    expected = copy.deepcopy(model).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x), expected(x))
        assert peak_nbytes(lambda: model(x)) <= 2.6 * UNIT_NBYTES + (1 << 20)


@tiers
@pytest.mark.parametrize("trainable", ["frozen", "trained"])
def test_error_leaves_the_device_empty(manage: Manage, tier: str, trainable: str) -> None:
    """features F10, C5"""
    model = nn.Sequential(*wide(4), nn.Linear(3, 3))
    if trainable == "frozen":
        frozen(model)
    manager = manage(model, "cuda", tier=tier, trainable=tier)
    x = torch.randn(4, WIDE, device="cuda").requires_grad_()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            model(x)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < UNIT_NBYTES
    assert manager.stats().resident_nbytes == 0


@tiers
def test_close_and_forgetting_give_all_back(tmp_path: Path, tier: str) -> None:
    """features C9, B11"""
    torch.zeros(1, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = frozen(wide(3))
    options: dict[str, Any] = {"path": tmp_path} if tier == "nvme" else {}
    with OffloadManager(model, "cuda", tier=tier, keep_resident_bytes=1 << 30, **options):
        infer_once(model, torch.ones(1, WIDE, device="cuda"))
        assert torch.cuda.memory_allocated() - before >= 3 * UNIT_NBYTES
    gc.collect()
    assert torch.cuda.memory_allocated() - before < UNIT_NBYTES + (20 << 20)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@tiers
def test_model_that_was_on_the_device_returns_to_it(tmp_path: Path, tier: str) -> None:
    model = frozen(wide(3)).cuda()
    x = torch.ones(1, WIDE, device="cuda")
    expected = model(x)
    options: dict[str, Any] = {"path": tmp_path} if tier == "nvme" else {}
    with OffloadManager(model, "cuda", tier=tier, **options):
        assert torch.equal(model(x), expected)
    assert all(p.shape == (WIDE, WIDE) for p in model.parameters())
    model.cuda()
    assert torch.equal(model(x), expected)
