"""On a GPU, where values that are not there can't be computed with, and memory can be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap
from tests.offload.components import DIM, Autoencoder, Denoiser, seeded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", "nvme"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"path": tmp_path} if request.param == "nvme" else {}


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * DIM, device="cuda").view(8, DIM)


def test_parameters_used_by_methods_are_on_the_device(place: dict[str, Any]) -> None:
    lazy, plain = nvmeswap.lazy(lambda: seeded(Autoencoder), **place), seeded(Autoencoder).cuda()
    for _ in range(3):
        assert torch.equal(lazy.decode(lazy.encode(x())), plain.decode(plain.encode(x())))
        lazy.release()
        assert lazy.shift.device.type == "cpu" and lazy.device.type == "cuda"
    assert lazy.to("cuda") is lazy and lazy.cuda() is lazy
    lazy.close()


def test_adapter_is_released_with_its_component(place: dict[str, Any]) -> None:
    # field case C2
    lazy, plain = nvmeswap.lazy(lambda: seeded(Denoiser), **place), seeded(Denoiser).cuda()
    for module in (lazy, plain):
        module(x())
        adapter = nn.Linear(DIM, DIM)
        nn.init.constant_(adapter.weight, 0.01)
        nn.init.constant_(adapter.bias, 0.5)
        module.blocks[0][0] = nn.Sequential(adapter.cuda(), module.blocks[0][0])
        module.blocks[1][0].weight.data += 1
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(lazy(x()), plain(x()))
            lazy.release()
            assert {p.device.type for p in lazy.parameters()} == {"cpu"}
    lazy.close()


@torch.no_grad()
def test_peak_memory_is_the_largest_overlapping_set(place: dict[str, Any]) -> None:
    # field case C20, C21
    def load() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))

    nbytes = 4 * 2048 * 2048 * 4
    components = {name: nvmeswap.lazy(load, **place) for name in "abc"}
    a, b, c = components.values()
    pipeline = nvmeswap.LazyPipeline([a, lambda x: c(b(x)), c], components)
    value = torch.ones(1, 2048, device="cuda")
    wanted = pipeline(value)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_nbytes = torch.cuda.memory_allocated()
    for _ in range(3):
        assert torch.equal(pipeline(value), wanted)
        assert torch.cuda.memory_allocated() <= before_nbytes + (1 << 20)
    peak_nbytes = torch.cuda.max_memory_allocated() - before_nbytes
    assert 2 * nbytes <= peak_nbytes <= 2 * nbytes * 1.05
    ahead = nvmeswap.LazyPipeline(pipeline.stages, components, device_budget_bytes=3 * nbytes)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            assert torch.equal(ahead(value), wanted)
    pipeline.close()
