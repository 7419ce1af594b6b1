"""Whatever is called in whatever order, with transfers that fail in between, equals RAM."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.errors import SwapIOError
from tests.swap.conftest import Bench
from tests.swap.twins import ADAMW, BF16, FP32, Twins, parameters_of

NOTHING = "read 1000000 errno 5"
FAULTS = st.tuples(
    st.sampled_from(["read", "write"]),
    st.integers(1, 12),
    st.sampled_from(["errno 5", "errno 28", "short 512", "busy", "flip"]),
)


class Run:
    """Twins, and the last checkpoint of both."""

    def __init__(self, bench: Bench, slot_count: int) -> None:
        self.bench = bench
        self.twins = Twins(
            ADAMW,
            parameters_of([(37,), (9000,), (5000,), ()], [FP32, BF16, torch.float16, BF16]),
            lambda groups: bench.optimizer(
                ADAMW.kind, groups, buffer_count=2, slot_count=slot_count, **ADAMW.options
            ),
        )
        self.seed = 0
        self.saved: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def step(self, number: int) -> None:
        self.seed += 1
        self.twins.backward(self.seed, without=[number % 6])
        self.twins.step_plain()
        self.until_it_succeeds(self.twins.swapped.step)
        self.twins.swapped.zero_grad()

    def forget_gradients(self, number: int) -> None:
        self.twins.backward(number)
        self.twins.swapped.zero_grad()

    def add_group(self, number: int) -> None:
        if len(self.twins.params) < 7 and self.saved is None:
            new = parameters_of([(number * 1000,)], [[FP32, BF16, torch.float16][number % 3]])
            self.twins.add_group(new, lr=0.02)

    def edit(self, number: int) -> None:
        parameter, master = self.one(number)
        with torch.no_grad():
            parameter.copy_(parameter.abs() + 8)
            master.copy_(parameter)

    def write_master(self, number: int) -> None:
        parameter, master = self.one(number)
        with torch.no_grad():
            master.add_(1.001)
        value = master.detach().clone()
        self.until_it_succeeds(lambda: self.twins.swapped.write_state(parameter, value))

    def write_moment(self, number: int) -> None:
        parameter, master = self.one(number)
        moment = self.twins.plain.state[master].get("exp_avg")
        if moment is not None and parameter.numel():  # an empty one has no state here
            moment.add_(0.5)
            value = moment.clone()
            self.until_it_succeeds(
                lambda: self.twins.swapped.write_state(parameter, value, "exp_avg")
            )

    def read(self, number: int) -> None:
        parameter, master = self.one(number)
        seen = []
        self.until_it_succeeds(lambda: seen.append(self.twins.swapped.read_state(parameter)))
        assert torch.equal(seen[-1], master), number

    def save(self, number: int) -> None:
        path = self.bench.nvme_path / "saved"
        self.until_it_succeeds(lambda: self.twins.swapped.save(path))
        self.saved = (
            copy.deepcopy(self.twins.plain.state_dict()),
            [master.detach().clone() for master in self.twins.masters],
        )

    def restore(self, number: int) -> None:
        """In the middle of a step that failed, perhaps."""
        if self.saved is None:
            return
        twins = self.twins
        state, masters = self.saved
        if number % 2:
            twins.backward(number)
            self.bench.engine.inject("any * errno 5")
            with contextlib.suppress(SwapIOError):  # all of it may be in memory
                for _ in range(4):
                    twins.swapped.step()
                    twins.swapped.flush()
            self.bench.engine.inject(NOTHING)
        with torch.no_grad():
            for parameter, master, value in zip(
                twins.params, twins.masters, masters, strict=True
            ):
                master.copy_(value)
                parameter.copy_(value)
        twins.plain.load_state_dict(copy.deepcopy(state))
        path = self.bench.nvme_path / "saved"
        self.until_it_succeeds(lambda: twins.swapped.load(path))
        twins.swapped.zero_grad()

    def one(self, number: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        index = number % len(self.twins.params)
        return self.twins.params[index], self.twins.masters[index]

    def until_it_succeeds(self, call: Callable[[], Any]) -> None:
        for _ in range(8):
            try:
                call()
                return
            except SwapIOError:
                continue
        raise AssertionError("it never succeeded")


CALLS = [
    Run.step, Run.step, Run.step, Run.forget_gradients, Run.add_group, Run.edit,
    Run.write_master, Run.write_moment, Run.read, Run.save, Run.restore,
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(CALLS), st.integers(0, 9), st.lists(FAULTS, max_size=2)
        ),
        min_size=3, max_size=14,
    ),
    slot_count=st.sampled_from([2, 3, 5, 20]),
)
def test_any_sequence_of_calls_equals_ram(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[Callable[[Run, int], None], int, list[tuple[str, int, str]]]],
    slot_count: int,
) -> None:
    """Never wrong, whatever failed and was tried again on the way."""
    bench = Bench(tmp_path_factory.mktemp("calls"))
    try:
        run = Run(bench, slot_count)
        for call, number, faults in calls:
            script = "; ".join(f"{way} {n} {what}" for way, n, what in faults)
            bench.engine.inject(script or NOTHING)
            call(run, number)
            run.twins.assert_same_parameters()
        bench.engine.inject(NOTHING)
        run.step(9)
        run.twins.assert_same()
        for index, master in enumerate(run.twins.masters):
            assert torch.equal(run.twins.swapped.read_state(run.twins.params[index]), master)
    finally:
        bench.close()
