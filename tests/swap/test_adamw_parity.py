"""SwappedAdamW equals torch.optim.AdamW(fused=True), bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from nvmeswap.errors import SwapManifestError, SwapPathError, SwapUsageError
from nvmeswap.swap.adamw import SwappedAdamW
from tests.swap.conftest import Bench, set_gradients

SIZES = [1, 37, 4096, 1_000_003]
MakeParameters = Callable[..., list[torch.nn.Parameter]]


def two_groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 3e-3, "weight_decay": 0.1},
        {"params": params[1::2], "lr": 1e-2, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("sub_group_size", [2_000_000, 204_800], ids=["1 group", "5 groups"])
def test_swapped_adamw_over_10_steps_equals_torch(
    tmp_path: Path, parameters: MakeParameters, sub_group_size: int
) -> None:
    """Else a run with state on NVMe would drift from the run in RAM.  field case O04"""
    ours, theirs = parameters(SIZES), parameters(SIZES)
    swapped = SwappedAdamW(two_groups(ours), nvme_path=tmp_path, sub_group_size=sub_group_size)
    resident = torch.optim.AdamW(two_groups(theirs), fused=True)
    assert swapped.stats().sub_group_count == (1 if sub_group_size > 1_100_000 else 5)
    schedules = [CosineAnnealingLR(optimizer, T_max=10) for optimizer in (swapped, resident)]
    for step in range(10):
        for params, optimizer in ((ours, swapped), (theirs, resident)):
            set_gradients(params, step)
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        for size, mine, reference in zip(SIZES, ours, theirs, strict=True):
            assert torch.equal(mine, reference), f"step {step}, size {size}"
    reference_state = resident.state_dict()["state"]
    for index, state in swapped.state_dict()["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], reference_state[index][name]), (index, name)
    swapped.close()


@pytest.mark.parametrize("buffer_count", [1, 2, 3, 12])
def test_swapped_adamw_with_any_number_of_buffers_gives_the_same(
    bench: Bench, parameters: MakeParameters, buffer_count: int
) -> None:
    """Peers stop for lack of buffers at their own default.  field cases P01, P02"""
    ours, theirs = parameters([5000, 9000, 30_000]), parameters([5000, 9000, 30_000])
    swapped = bench.adamw(ours, sub_group_size=4096, buffer_count=buffer_count)
    resident = torch.optim.AdamW(theirs, fused=True)
    for step in range(6):
        for params, optimizer in ((ours, swapped), (theirs, resident)):
            set_gradients(params, step)
            optimizer.step()
    swapped.flush()
    assert all(map(torch.equal, ours, theirs))
    (pool,) = bench.pools
    stats = pool.stats()
    assert stats.free_count + stats.in_use_count == stats.slot_count == min(buffer_count, 12)
    # The walk turns round: what the last step left in memory is not read again.
    assert swapped.stats().hit_count > 0


def test_bf16_parameters_get_the_rounded_values_of_an_fp32_master(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Else small updates to bf16 weights are lost by rounding."""
    ours = parameters([37, 10_000], dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in ours]
    swapped = bench.adamw(ours, lr=1e-4)
    resident = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(5):
        set_gradients(ours, step)
        for master, parameter in zip(masters, ours, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        swapped.step()
        resident.step()
        for master, parameter in zip(masters, ours, strict=True):
            assert torch.equal(parameter, master.bfloat16())
    state = swapped.state_dict()["state"]
    assert all(torch.equal(state[i]["master"], master) for i, master in enumerate(masters))


def test_parameter_without_gradient_is_left_alone_and_its_step_does_not_count(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Else an unused expert would decay, and its bias correction would be wrong."""
    ours, theirs = parameters([100, 5000, 300]), parameters([100, 5000, 300])
    swapped, resident = bench.adamw(ours), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        for params, optimizer in ((ours, swapped), (theirs, resident)):
            set_gradients(params, step)
            params[step % 3].grad = None
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))


def test_frozen_parameters_have_no_state(bench: Bench, parameters: MakeParameters) -> None:
    """Else a LoRA base would take 12 bytes a parameter on the drive.  field case N04"""
    ours = parameters([100, 5000])
    ours[1].requires_grad_(False)
    swapped = bench.adamw(ours)
    set_gradients(ours[:1], 0)
    swapped.step()
    assert list(swapped.state_dict()["state"]) == [0]
    assert swapped.stats().sub_group_count == 1


def test_fresh_state_is_zero_even_in_poisoned_memory(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Else moments start as garbage, or step 1 corrects as step 2.  field cases B11, D11"""
    ours, theirs = parameters([9000]), parameters([9000])
    swapped = bench.adamw(ours, weight_decay=0.1)
    assert swapped.read_state(ours[0], "exp_avg").count_nonzero() == 0
    assert swapped.state_dict()["state"] == {}
    resident = torch.optim.AdamW(theirs, weight_decay=0.1, fused=True)
    for params, optimizer in ((ours, swapped), (theirs, resident)):
        set_gradients(params, 0)
        optimizer.step()
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_loaded_into_another_optimizer_goes_on_the_same(
    bench: Bench, tmp_path: Path, parameters: MakeParameters, dtype: torch.dtype
) -> None:
    """Else a resumed run would differ, or its state would be in the wrong precision.
    field case F05"""
    ours = parameters([37, 9000], dtype=dtype)
    first = bench.adamw(ours, lr=1e-2)
    for step in range(3):
        set_gradients(ours, step)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    others = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    (tmp_path / "second").mkdir()
    second = SwappedAdamW(
        others, lr=5e-1, nvme_path=tmp_path / "second", sub_group_size=5000, buffer_count=1
    )
    second.load_state_dict(saved)
    for step in range(3, 5):
        for params, optimizer in ((ours, first), (others, second)):
            set_gradients(params, step)
            optimizer.step()
    assert all(map(torch.equal, ours, others))
    second.close()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=5),
    ],
    ids=["LambdaLR", "OneCycleLR"],
)
def test_schedulers_set_the_rate_of_the_next_step(
    bench: Bench, parameters: MakeParameters, schedule: Callable[[Any], Any]
) -> None:
    """Else the schedule of a script would be ignored.  field case O04"""
    ours, theirs = parameters([5000]), parameters([5000])
    swapped, resident = bench.adamw(ours), torch.optim.AdamW(theirs, fused=True)
    schedules = [schedule(swapped), schedule(resident)]
    for step in range(4):
        for params, optimizer in ((ours, swapped), (theirs, resident)):
            set_gradients(params, step)
            optimizer.step()
        for each in schedules:
            each.step()
    assert torch.equal(ours[0], theirs[0])


def test_step_hooks_are_called(bench: Bench, parameters: MakeParameters) -> None:
    """It is a torch optimizer: tools hook into it."""
    calls: list[str] = []
    swapped = bench.adamw(parameters([10]))
    swapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    swapped.register_step_post_hook(lambda *_: calls.append("post"))
    swapped.step()
    assert calls == ["pre", "post"]


def test_what_is_not_served_is_refused_by_name(
    bench: Bench, tmp_path: Path, parameters: MakeParameters
) -> None:
    """Else a closure or an odd parameter would be ignored in silence."""
    swapped = bench.adamw(parameters([10]))
    with pytest.raises(SwapUsageError, match="closure"):
        swapped.step(lambda: 1.0)
    with pytest.raises(SwapUsageError, match="contiguous"):
        bench.adamw([torch.nn.Parameter(torch.randn(4, 6).t())])
    with pytest.raises(SwapPathError):
        SwappedAdamW(parameters([10]), nvme_path=tmp_path / "missing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_loaded_after_the_optimizer_was_built_count(
    bench: Bench, parameters: MakeParameters, dtype: torch.dtype
) -> None:
    """The fp32 master must not bring the old weights back: of a parameter that was written to, the
    value is what was written."""
    ours = parameters([37, 9000, 200], dtype=dtype)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in ours]
    swapped, resident = bench.adamw(ours, lr=1e-4), torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                ours[0].add_(1)
                ours[1].copy_(torch.linspace(-2, 2, 9000))
                for index in (0, 1):  # the third was not edited: it stays exact
                    masters[index].copy_(ours[index])
        set_gradients(ours, step)
        for master, parameter in zip(masters, ours, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        swapped.step()
        resident.step()
        assert all(map(torch.equal, ours, [master.to(dtype) for master in masters])), step


def test_loading_the_state_of_a_fresh_optimizer_forgets_the_moments(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Else a restart from scratch would keep the momentum of the abandoned run."""
    ours, theirs = parameters([5000]), parameters([5000])
    pair = [(ours, bench.adamw(ours)), (theirs, torch.optim.AdamW(theirs, fused=True))]
    fresh = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair]
    for step in range(6):
        for (params, optimizer), state in zip(pair, fresh, strict=True):
            if step == 3:
                optimizer.load_state_dict(state)
            set_gradients(params, step)
            optimizer.step()
        assert torch.equal(ours[0], theirs[0]), step


def test_state_of_another_size_is_refused_before_anything_changes(
    bench: Bench, parameters: MakeParameters, tmp_path: Path
) -> None:
    """Cut off to fit, it would be garbage."""
    large, small = parameters([6000]), parameters([4000])
    (tmp_path / "other").mkdir()
    saved = SwappedAdamW(large, nvme_path=tmp_path / "other")
    set_gradients(large, 0)
    saved.step()
    swapped = bench.adamw(small)
    set_gradients(small, 0)
    swapped.step()
    before = swapped.state_dict()["state"][0]["exp_avg"]
    with pytest.raises(SwapManifestError) as raised:
        swapped.load_state_dict(saved.state_dict())
    assert raised.value.field == "shape"
    assert torch.equal(swapped.state_dict()["state"][0]["exp_avg"], before)
    saved.close()


def test_parameter_thawed_after_the_optimizer_was_built_is_refused(
    bench: Bench, parameters: MakeParameters
) -> None:
    """It has no state: it would never be trained, without a word."""
    ours = parameters([100, 200])
    ours[1].requires_grad_(False)
    swapped = bench.adamw(ours)
    ours[1].requires_grad_(True)
    set_gradients(ours, 0)
    with pytest.raises(SwapUsageError, match="frozen"):
        swapped.step()


def test_parameter_frozen_between_backward_and_step_is_still_updated(
    bench: Bench, parameters: MakeParameters
) -> None:
    """torch updates whatever has a gradient."""
    ours, theirs = parameters([5000]), parameters([5000])
    for params, optimizer in (
        (ours, bench.adamw(ours)), (theirs, torch.optim.AdamW(theirs, fused=True))
    ):
        set_gradients(params, 0)
        params[0].requires_grad_(False)
        optimizer.step()
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"lr": "fast"}], ids=str
)
def test_option_out_of_range_is_refused(
    bench: Bench, parameters: MakeParameters, options: dict[str, Any]
) -> None:
    """torch's own limits, and its errors."""
    with pytest.raises((ValueError, TypeError)):
        bench.adamw(parameters([10]), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameter_that_fp32_can_not_hold_is_refused(bench: Bench, dtype: torch.dtype) -> None:
    """Its precision, or its imaginary part, would be lost."""
    with pytest.raises(SwapUsageError):
        bench.adamw([torch.nn.Parameter(torch.zeros(10, dtype=dtype))])


def test_copying_or_pickling_the_optimizer_is_refused(
    bench: Bench, parameters: MakeParameters
) -> None:
    """Two optimizers on one file would destroy each other's state."""
    with pytest.raises(SwapUsageError, match="state_dict"):
        copy.deepcopy(bench.adamw(parameters([10])))
