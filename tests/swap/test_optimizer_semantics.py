"""It is a torch optimizer to hooks, scalers and schedulers, and counts what it moves."""

from __future__ import annotations

import math
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nvmeswap.config import SwapBlock
from nvmeswap.errors import SwapBudgetError, SwapConfigError, SwapManifestError, SwapUsageError
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from tests.swap.conftest import Make, set_gradients
from tests.swap.twins import ADAMW, BF16, FP32, Lion, Twins, parameters_of

MakeParameters = Callable[..., list[torch.nn.Parameter]]
KiB, MiB = 1 << 10, 1 << 20


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, Lion])
def test_step_hooks_of_all_kinds_are_called_once_a_step(
    make: Make, parameters: MakeParameters, kind: Any
) -> None:
    """Not once a piece: profilers and loggers count on it."""
    calls: list[str] = []
    params = parameters([37, 20_000])
    swapped = make(params, kind, sub_group_size=4096)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
        swapped.register_step_pre_hook(lambda *_: calls.append("pre")),
        swapped.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        for step in range(2):
            set_gradients(params, step)
            swapped.step()
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(calls) == sorted(["global pre", "pre", "global post", "post"] * 2)


def test_grad_scaler_skips_the_steps_that_it_skips_with_torch(
    make: Make, parameters: MakeParameters
) -> None:
    """A step skipped must leave no trace, and a scale no error."""
    ours, theirs = parameters([37, 9000]), parameters([37, 9000])
    pairs = [
        (ours, make(ours, sub_group_size=4096)),
        (theirs, torch.optim.AdamW(theirs, fused=True)),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pairs]
    for step in range(6):
        for (params, optimizer), scaler in zip(pairs, scalers, strict=True):
            loss = sum((p * (i + step)).square().sum() for i, p in enumerate(params, 1))
            assert isinstance(loss, Tensor)
            scaler.scale(loss).backward()
            if step == 2:
                assert params[0].grad is not None
                params[0].grad[3] = math.inf
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            elif params is theirs:  # fused, it would unscale by its own rounding
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert all(map(torch.equal, ours, theirs)), step
    assert pairs[0][1].state[ours[0]]["step"] == 5


def test_pickling_is_refused(make: Make, parameters: MakeParameters) -> None:
    """Two optimizers on one file would destroy each other's state."""
    with pytest.raises(SwapUsageError, match="state_dict"):
        pickle.dumps(make(parameters([10])))


def test_options_that_need_another_state_are_refused_before_anything_changes(
    make: Make, parameters: MakeParameters
) -> None:
    """Found in the middle, half of the parameters would have been updated."""
    ours, theirs = parameters([37, 9000]), parameters([37, 9000])
    swapped, plain = make(ours, sub_group_size=4096), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step == 2:
            swapped.param_groups[0]["amsgrad"] = True
            with pytest.raises(SwapUsageError, match="max_exp_avg_sq"):
                swapped.step()
            swapped.param_groups[0]["amsgrad"] = False
            assert not swapped.step_is_unfinished
        swapped.step()
        plain.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(), (90, 100)])
def test_values_and_states_of_one_parameter_in_and_out(
    make: Make, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """What is written is what is read, what the parameter shows, and what the next step uses."""
    params = parameters_of([(37,), shape], [dtype, dtype])
    swapped = make(params, torch.optim.SGD, lr=1.0, momentum=1.0, sub_group_size=4096)
    assert torch.equal(swapped.read_state(params[1]), params[1].to(FP32))
    with pytest.raises(SwapUsageError, match="never updated"):
        swapped.write_state(params[1], torch.ones(shape), "momentum_buffer")
    set_gradients(params, 0)
    swapped.step()
    exact = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    swapped.write_state(params[1], exact)
    swapped.write_state(params[1], torch.full(shape, 0.5), "momentum_buffer")
    assert torch.equal(swapped.read_state(params[1]), exact)
    assert torch.equal(params[1], exact.to(dtype))
    assert torch.equal(swapped.read_state(params[1], "momentum_buffer"), torch.full(shape, 0.5))
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    swapped.step()
    assert torch.equal(swapped.read_state(params[1]), exact - 0.5)
    with pytest.raises(SwapManifestError):
        swapped.write_state(params[1], torch.ones(3))
    with pytest.raises(SwapUsageError, match="no state called"):
        swapped.write_state(params[1], exact, "exp_avg")
    with pytest.raises(SwapUsageError, match="not one of"):
        swapped.read_state(torch.nn.Parameter(torch.ones(3)))


def final(make: Make, **options: Any) -> list[Tensor]:
    params = parameters_of([(37,), (150_000,), (9000,)], [BF16, FP32, torch.float16])
    swapped = make(params, **options)
    for step in range(4):
        set_gradients(params, step)
        swapped.step()
    return [*params, *(swapped.read_state(p, "exp_avg_sq") for p in params)]


def test_values_depend_on_no_setting(make: Make) -> None:
    """Sizes, budgets, the direction of the walk (each other step), threads: they cost time."""
    thread_count = torch.get_num_threads()
    expected = final(make, sub_group_size=1 << 20)
    for options in (
        {"sub_group_size": 4096, "buffer_count": 1},
        {"sub_group_size": 12_288, "buffer_count": 2, "update_thread_count": 1},
        {"sub_group_size": 100_000, "ratio": 0.5, "update_thread_count": 2},
        {"swap": SwapBlock(host_memory_nbytes=MiB)},
        {"swap": SwapBlock(host_memory_nbytes=64 * MiB, checksum="off")},
        {"ratio": 0.0},
    ):
        assert all(map(torch.equal, final(make, **options), expected)), options
        assert torch.get_num_threads() == thread_count


def test_every_byte_moved_is_counted(make: Make) -> None:
    """2.125 bytes of master and 8 of states for each bf16 element, each way; the first step has
    nothing to read; and gradients are not moved at all.  field case O03"""
    numel = 4 * 65_536
    params = parameters_of([(numel,)], [BF16])
    swapped = make(params, sub_group_size=65_536, buffer_count=1)
    state_nbytes = numel * (2 * 8 + 1 + 32 + 32) // 8
    assert swapped.stats().write_nbytes == 0
    set_gradients(params, 0)
    swapped.step()
    stats = swapped.stats()
    assert (stats.read_nbytes, stats.write_nbytes) == (0, state_nbytes)
    for step in (1, 2):
        set_gradients(params, step)
        swapped.step()
    stats = swapped.stats()
    # The walk turns round: the sub-group in the one slot is not read again.
    assert stats.read_nbytes == 2 * state_nbytes * 3 // 4
    assert stats.write_nbytes == 3 * state_nbytes
    assert stats.step_count == 3 and stats.gradient_nbytes == 0


def test_budget_that_holds_a_quarter_of_the_state_saves_a_fifth_of_the_reads(make: Make) -> None:
    """Memory that is there must be of use."""
    numel = 32 * 16_384
    state_nbytes = numel * 8
    read_nbytes, hit_counts = [], []
    for budget_nbytes in (3 * state_nbytes // 32, 3 * state_nbytes // 32 + state_nbytes // 4):
        params = parameters_of([(numel,)], [FP32])
        swapped = make(
            params, sub_group_size=16_384, swap=SwapBlock(host_memory_nbytes=budget_nbytes)
        )
        for step in range(4):
            set_gradients(params, step)
            swapped.step()
        stats = swapped.stats()
        read_nbytes.append(stats.read_nbytes)
        hit_counts.append(stats.hit_count)
    assert read_nbytes[1] <= 0.8 * read_nbytes[0]
    assert hit_counts[1] >= hit_counts[0] + 3 * 8


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("group_count", [1, 2, 3, 8])
def test_ratio_says_how_many_sub_groups_are_swapped(
    make: Make, group_count: int, ratio: float
) -> None:
    """A share of 0 must not write a byte, however few sub-groups there are."""
    params = parameters_of([(group_count * 8192,)], [FP32])
    swapped = make(params, sub_group_size=8192, ratio=ratio)
    for step in range(2):
        set_gradients(params, step)
        swapped.step()
    stats = swapped.stats()
    assert stats.sub_group_count == group_count
    assert stats.in_ram_count >= group_count - int(ratio * group_count)
    assert stats.write_nbytes == 2 * (group_count - stats.in_ram_count) * 8192 * 8


@pytest.mark.parametrize(
    "options", [{"ratio": 1.5}, {"buffer_count": 0}, {"sub_group_size": 0}], ids=str
)
def test_settings_out_of_range_are_refused(
    make: Make, parameters: MakeParameters, options: dict[str, Any]
) -> None:
    with pytest.raises(SwapConfigError):
        make(parameters([10]), **options)
    with pytest.raises(SwapBudgetError):
        make(parameters([10]), swap=SwapBlock(host_memory_nbytes=KiB))


@pytest.mark.parametrize("overlap", [None, OverlapSettings()], ids=["", "overlap"])
def test_steps_stopped_by_ctrl_c_go_on(
    tmp_path: Path, overlap: OverlapSettings | None
) -> None:
    """In a notebook a cell is stopped at any moment."""
    twins = Twins(
        ADAMW,
        parameters_of([(37,), (50_000,), (30_000,)], [FP32, BF16, torch.float16]),
        lambda groups: SwappedOptimizer(
            ADAMW.kind, groups, nvme_path=tmp_path, pin_memory=False, sub_group_size=4096,
            buffer_count=2, overlap=overlap, **ADAMW.options,
        ),
    )
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    stopped_count = 0
    try:
        for step in range(12):
            losses = []
            generator = torch.Generator().manual_seed(step)
            for parameter, master in zip(twins.params, twins.masters, strict=True):
                weights = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                master.grad = weights.to(FP32)
                losses.append((parameter * weights).sum().to(FP32))
            torch.stack(losses).sum().backward()
            twins.plain.step()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (step + 1))
                twins.swapped.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                stopped_count += 1
                if twins.swapped.step_is_unfinished or not _is_done(twins, step):
                    twins.swapped.step()
            twins.swapped.zero_grad()
            twins.assert_same_parameters()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    twins.assert_same()
    assert stopped_count
    twins.swapped.close()


def _is_done(twins: Twins, step: int) -> bool:
    return int(twins.swapped.state[twins.params[0]].get("step", 0)) == step + 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_exact_values_given_before_any_update_are_saved(
    make: Make, tmp_path: Path, kind: Any
) -> None:
    """The parameter has only their rounding."""
    exact = torch.linspace(-2, 2, 9000)
    params, others = (parameters_of([(37,), (9000,)], [BF16, BF16]) for _ in range(2))
    swapped, other, third = (make(each, kind, lr=0.1) for each in (params, others, others))
    swapped.write_state(params[1], exact)
    swapped.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert torch.equal(other.read_state(others[1]), exact)
    third.load_state_dict(other.state_dict())
    assert torch.equal(third.read_state(others[1]), exact)
    assert torch.equal(others[1], exact.bfloat16())
    for each, optimizer in ((params, swapped), (others, third)):
        set_gradients(each, 0)
        optimizer.step()
    assert all(map(torch.equal, params, others))
