"""Managers over folders of their own, closed at the end; the engines of those on NVMe can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager
from nvmeswap.errors import SwapClosedError
from nvmeswap.io.engine import Engine
from tests.offload.blocks import Blocks, Managed
from tests.offload.runs import twins

Manage = Callable[..., OffloadManager]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small models only wait for a second one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def manage(tmp_path: Path) -> Iterator[Manage]:
    """Makes a manager; tier "nvme" and this test's folder unless told otherwise."""
    with contextlib.ExitStack() as opened:

        def make(
            model: nn.Module, device: str = "cpu", *, tier: str = "nvme", **options: Any
        ) -> OffloadManager:
            if "nvme" in (tier, options.get("trainable")):
                options.setdefault("path", tmp_path)
            return opened.enter_context(OffloadManager(model, device, tier=tier, **options))

        yield make


@pytest.fixture
def pair(manage: Manage) -> Managed:
    """A plain model, a managed one like it, and its manager; trained where it is stored."""

    def make(build: Callable[[], nn.Module] = Blocks, *, tier: str = "cpu", **options: Any) -> Any:
        plain, model = twins(build)
        return plain, model, manage(model, tier=tier, trainable=tier, **options)

    return make


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines that managers open, the last one last; each fails when it is told to."""
    made: list[Engine] = []

    def open_engine(**options: Any) -> Engine:
        made.append(Engine(fault_script="", **options))
        return made[-1]

    monkeypatch.setattr("nvmeswap.swap.space.Engine", open_engine)
    yield made
    for engine in made:
        with contextlib.suppress(SwapClosedError):
            engine.inject("")
