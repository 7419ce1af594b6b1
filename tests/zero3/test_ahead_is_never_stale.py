"""Copies that are made before their use: of the values at the use, or not used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nvmeswap.memory.arena import Arena
from nvmeswap.memory.pool import Pool
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.zero3.ahead import DeviceAhead

NUMEL = 1000
KEYS = [f"layer {index}" for index in range(6)]


@contextmanager
def swapper() -> Iterator[PartitionedParamSwapper]:
    """In host memory, each shard full of its number, with one step behind it."""
    specs = [ShardSpec(key, NUMEL, torch.float32) for key in KEYS]
    placement = ParamPlacement(
        on_nvme=False, min_swap_nbytes=0, buffer_count=1, largest_slot_numel=NUMEL, max_in_cpu=0
    )
    classes = placement.slot_classes(specs)
    arena = Arena(Pool.nbytes_needed(classes))
    pool = Pool(arena.memory, classes, name="parameters")
    params = PartitionedParamSwapper(specs, placement, store=None, pool=pool, timeout_s=5)
    for number, key in enumerate(KEYS):
        params.write(key, torch.full((NUMEL,), float(number)))
    for key in KEYS:
        params.fetch(key, torch.empty(NUMEL))
    params.end_step()
    yield params
    arena.close()


@pytest.fixture
def params() -> Iterator[PartitionedParamSwapper]:
    with swapper() as made:
        yield made


def fetch(params: PartitionedParamSwapper, ahead: DeviceAhead, key: str) -> tuple[float, bool]:
    values = ahead.take(key)
    was_ahead = values is not None
    if values is None:
        values = torch.full((NUMEL,), torch.nan)
        params.fetch(key, values)
    ahead.look_ahead()
    assert values.unique().numel() == 1
    return values[0].item(), was_ahead


def test_all_but_the_first_are_ahead_within_the_budget(params: PartitionedParamSwapper) -> None:
    ahead = DeviceAhead(params, torch.device("cpu"), 2 * 4 * NUMEL)
    for _ in range(3):
        got = [fetch(params, ahead, key) for key in KEYS]
        assert got == [(float(n), n > 0) for n in range(len(KEYS))]
        params.end_step()


def test_before_a_pass_its_first_come_ahead_too(params: PartitionedParamSwapper) -> None:
    """Nothing computes then that could hide their copies."""
    ahead = DeviceAhead(params, torch.device("cpu"), 2 * 4 * NUMEL)
    for _ in range(3):
        ahead.look_ahead()
        got = [fetch(params, ahead, key) for key in KEYS]
        assert got == [(float(n), True) for n in range(len(KEYS))]
        params.end_step()


def test_what_was_updated_meanwhile_is_fetched_anew(params: PartitionedParamSwapper) -> None:
    ahead = DeviceAhead(params, torch.device("cpu"), 1 << 20)
    assert fetch(params, ahead, KEYS[0]) == (0.0, False)
    params.update(KEYS[2], NUMEL - 1, torch.full((1,), 2.0))
    params.write(KEYS[3], torch.full((NUMEL,), 7.0))
    got = [fetch(params, ahead, key) for key in KEYS[1:]]
    assert got == [(1.0, True), (2.0, False), (7.0, False), (4.0, True), (5.0, True)]


def test_passes_without_steps_come_ahead_again(params: PartitionedParamSwapper) -> None:
    """Evaluation after a step of forward and backward: what was copied for a backward that does not
    come must not fill the budget."""
    ahead = DeviceAhead(params, torch.device("cpu"), 2 * 4 * NUMEL)
    for key in [*KEYS, *reversed(KEYS)]:
        fetch(params, ahead, key)
    params.end_step()
    for number in range(4):
        got = [fetch(params, ahead, key) for key in KEYS]
        assert [value for value, _ in got] == [float(n) for n in range(len(KEYS))]
        assert sum(was_ahead for _, was_ahead in got) >= len(KEYS) - 2, number


def test_a_wrong_plan_costs_time_only(params: PartitionedParamSwapper) -> None:
    ahead = DeviceAhead(params, torch.device("cpu"), 3 * 4 * NUMEL)
    for order in ([5, 0, 0, 3], [1, 2], [4, 4, 4], [0, 1, 2, 3, 4, 5]):
        got = [fetch(params, ahead, KEYS[n])[0] for n in order]
        assert got == [float(n) for n in order]
        for key in KEYS:
            params.write(key, torch.full((NUMEL,), float(KEYS.index(key))))
        params.end_step()
