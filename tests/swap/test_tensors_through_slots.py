"""What TensorSwapper promises holds for tensors that go through slots. Here they are on the CPU,
which is made to count as a GPU: `test_tensors_on_cuda.py` has what only a GPU can show."""

from __future__ import annotations

import pytest

from nvmeswap.memory.slot import SlotClass
from nvmeswap.swap import staging
from tests.swap import test_interrupts_anywhere as interrupts
from tests.swap import test_many_tensors_come_back as many
from tests.swap import test_tensors_come_back as single


@pytest.fixture(autouse=True)
def through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small: what is large is cut, and slots are waited for."""
    monkeypatch.setattr(staging, "STAGED_DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr(staging, "SLOTS", SlotClass(65536, 3))


swapper = many.swapper
NEED_NO_SLOT = {
    "test_discarding_what_is_being_prefetched_leaves_the_rest",
    "test_a_slot_whose_acquisition_was_interrupted_anywhere_comes_back",
}
for suite in (single, many, interrupts):
    tests = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
    globals().update({name: tests[name] for name in tests if name not in NEED_NO_SLOT})
