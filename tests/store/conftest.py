"""Stores on real folders, full filesystems, and memory that shows when it is overrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.io.engine import Engine
from nvmeswap.io.probe import probe_folder
from nvmeswap.store.store import Store

GUARD_NBYTES = 64
POISON = 0xA5


@dataclass
class Workshop:
    """Makes stores and engines, and closes them when the test is over."""

    stores: list[Store] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    def store(self, nvme_path: Path, *, run: str = "run", rank: int = 0, world_size: int = 1,
              fault_script: str | None = None, **options: Any) -> Store:
        probe = probe_folder(nvme_path)
        engine = Engine(backend=probe.backend, fault_script=fault_script)
        self.engines.append(engine)
        store = Store(nvme_path, run=run, rank=rank, world_size=world_size, engine=engine,
                      probe=probe, **options)
        self.stores.append(store)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    made = Workshop()
    yield made
    made.close()


@dataclass
class Guarded:
    """`memory` of some bytes, poisoned, between guard bytes that nobody may touch."""

    memory: torch.Tensor
    whole: torch.Tensor

    def intact(self) -> bool:
        guards = torch.cat([self.whole[:GUARD_NBYTES], self.whole[-GUARD_NBYTES:]])
        return bool((guards == POISON).all())


@pytest.fixture
def guarded() -> Callable[[int], Guarded]:
    def make(nbytes: int) -> Guarded:
        whole = torch.full((nbytes + 2 * GUARD_NBYTES,), POISON, dtype=torch.uint8)
        return Guarded(whole[GUARD_NBYTES : GUARD_NBYTES + nbytes], whole)

    return make
