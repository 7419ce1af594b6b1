"""What TensorSwapper promises holds for tensors that go through slots. Here they are on the CPU,
which is made to count as a GPU: `test_tensors_on_cuda.py` has what only a GPU can show."""

from __future__ import annotations

import pytest

from nvmeswap.memory.slot import SlotClass
from nvmeswap.swap import staging
from tests.swap import test_interrupts_anywhere as interrupts
from tests.swap import test_many_tensors_come_back as many
from tests.swap import test_tensors_come_back as single


@pytest.fixture(autouse=True, params=[(65536, 1), (1 << 20, 3)], ids=["one slot", "three slots"])
def through_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, count = request.param
    monkeypatch.setattr(staging, "STAGED_DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(staging, "SLOTS", SlotClass(nbytes, count))


swapper = many.swapper
ARE_LARGE = {"test_discarding_what_is_being_prefetched_leaves_the_rest"}  # and wait for nothing
for suite in (single, many, interrupts):
    tests = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
    globals().update({name: tests[name] for name in tests.keys() - ARE_LARGE})
