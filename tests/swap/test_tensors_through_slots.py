"""What TensorSwapper promises holds for tensors that go through slots. Here they are on the CPU,
which is made to count as a GPU: `test_tensors_on_cuda.py` has what only a GPU can show."""

from __future__ import annotations

import pytest

from nvmeswap.memory.slot import SlotClass
from nvmeswap.swap import staging
from tests.swap import test_interrupts_anywhere as interrupts
from tests.swap import test_many_tensors_come_back as many
from tests.swap import test_tensors_come_back as single


@pytest.fixture(autouse=True, params=[(8192, 1), (65536, 3)], ids=["one small slot", "slots"])
def through_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, count = request.param
    monkeypatch.setattr(staging, "STAGED_DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(staging, "SLOTS", SlotClass(nbytes, count))


swapper = many.swapper
for suite in (single, many, interrupts):
    globals().update({k: v for k, v in vars(suite).items() if k.startswith("test_")})
