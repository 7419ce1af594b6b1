"""fp16 with loss scaling equals torch.amp.GradScaler over gradients in RAM, skipped steps too."""

from __future__ import annotations

import pickle
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.errors import SwapError, SwapOverflowError, SwapUsageError
from nvmeswap.zero3 import GradScaler
from tests.oracle import Run, first_difference
from tests.zero3.scaled import (
    FP16,
    assert_scaled_runs_equal,
    config,
    resident,
    scaled_run,
    square,
    swapped,
    weights,
)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_run_with_overflows_equals_ram(
    one_rank: None, tmp_path: Path, max_norm: float | None
) -> None:
    """Scaled high enough that first steps are skipped, then often enough that it grows again."""
    run = assert_scaled_runs_equal(tmp_path, max_norm=max_norm)
    scales = run.losses[::2] if max_norm is None else run.losses[1::3]
    assert min(scales) < 2.0**18, "no step was skipped"
    assert any(later > former for former, later in pairwise(scales))


def test_gradients_of_several_passes_are_unscaled_once(one_rank: None, tmp_path: Path) -> None:
    """field case O02"""

    def run(model: torch.nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> Run:
        for step in range(3):
            for micro_batch in range(3):
                scaler.scale(square(model, 3 * step + micro_batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return Run([scaler.get_scale()], weights(model))

    with swapped(tmp_path, fp16={"enabled": True}) as (model, optimizer):
        ours = run(model, optimizer, GradScaler(init_scale=2.0**10))
    theirs = run(*resident(FP16), torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert first_difference(ours, theirs) is None


def test_clipping_of_the_json_clips_what_was_unscaled(one_rank: None, tmp_path: Path) -> None:
    """A norm of scaled gradients would be thousands of times too large."""
    how: dict[str, Any] = {"init_scale": 2.0**10}
    settings = {"fp16": {"enabled": True}, "gradient_clipping": 0.1}
    with swapped(tmp_path, **settings) as (model, optimizer):
        ours = scaled_run(model, optimizer, GradScaler(**how))
    theirs = scaled_run(*resident(FP16), torch.amp.GradScaler("cpu", **how), max_norm=0.1)
    assert first_difference(Run([], ours.weights), Run([], theirs.weights)) is None


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_scaler_of_torch_gives_the_same_bits(
    one_rank: None, tmp_path: Path, max_norm: float | None
) -> None:
    """Accelerate brings its own; that must not do nothing, nor be warned of."""
    how: dict[str, Any] = {"init_scale": 2.0**18, "growth_interval": 3}
    runs = []
    with swapped(tmp_path, fp16={"enabled": True}) as pair, warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, optimizer in (pair, resident(FP16)):
            scaler = torch.amp.GradScaler("cpu", **how)
            runs.append(scaled_run(model, optimizer, scaler, max_norm=max_norm))
    assert first_difference(*runs) is None


def test_plain_step_with_fp16_warns_once(one_rank: None, tmp_path: Path) -> None:
    """DeepSpeed scales by itself; a loop that comes from there loses small gradients in silence."""
    with swapped(tmp_path, fp16={"enabled": True}) as (model, optimizer):
        square(model, 0).backward()
        with pytest.warns(UserWarning, match="GradScaler"):
            optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            square(model, 1).backward()
            optimizer.step()


def test_fp16_gradients_are_refused(one_rank: None, tmp_path: Path) -> None:
    """As torch does: unscaled they would round to zero."""
    with swapped(tmp_path, torch.float16, fp16={"enabled": True}) as (model, optimizer):
        scaler = GradScaler(init_scale=4.0)
        scaler.scale(square(model, 0)).backward()
        with pytest.raises(SwapUsageError, match="fp16"):
            scaler.unscale_(optimizer)


def test_step_that_failed_is_taken_again_with_the_same_gradients(
    one_rank: None, tmp_path: Path
) -> None:
    """A drive that failed once must not leave gradients that are unscaled twice."""
    how: dict[str, Any] = {"init_scale": 2.0**10}
    with swapped(tmp_path, hidden=700, fp16={"enabled": True}) as (model, optimizer):
        scaler = GradScaler(**how)
        first = scaled_run(model, optimizer, scaler, steps=1)
        optimizer.flush()
        (path,) = tmp_path.rglob("optimizer.swp")
        scaler.scale(square(model, 1)).backward()
        with path.open("r+b") as file:  # the sub-group that is needed last
            kept = file.read(8192)
            file.seek(0)
            file.write(bytes(len(kept)))
            file.flush()
            with pytest.raises(SwapError):
                scaler.step(optimizer)
            assert optimizer.step_is_unfinished
            with pytest.raises(SwapUsageError, match="unfinished"):
                optimizer.clip_grad_norm_(1.0)
            file.seek(0)
            file.write(kept)
        scaler.step(optimizer)
        scaler.update()
        ours = Run(first.losses, weights(model))
    twin, in_ram = resident(FP16, hidden=700)
    theirs = scaled_run(twin, in_ram, torch.amp.GradScaler("cpu", **how), steps=2)
    assert first_difference(Run([], ours.weights), Run([], theirs.weights)) is None


# --- the scale itself --------------------------------------------------------------------------


def scales_after(scaler: GradScaler, overflows: str) -> list[float]:
    """The scale after each update; "x" is an overflow."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for what in overflows:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), float("inf") if what == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def from_json(tmp_path: Path, **fp16: Any) -> GradScaler:
    return GradScaler.from_config(config(tmp_path, fp16={"enabled": True, **fp16}))


def test_scale_moves_as_deepspeeds_keys_say(tmp_path: Path) -> None:
    """Its users know these keys; each does what it does there."""
    power = {"initial_scale_power": 4, "loss_scale_window": 2}
    assert scales_after(from_json(tmp_path, **power, hysteresis=1), "..x..") == [16, 32, 16, 16, 32]
    spare = from_json(tmp_path, **power, hysteresis=2)
    assert scales_after(spare, "xx.x..x") == [16, 8, 8, 4, 4, 8, 8]
    anew = from_json(tmp_path, **power, hysteresis=2, consecutive_hysteresis=True)
    assert scales_after(anew, "x.x.xx") == [16, 16, 16, 16, 16, 8]
    static = from_json(tmp_path, loss_scale=128, loss_scale_window=1)
    assert scales_after(static, ".x..x") == [128] * 5


def test_overflow_at_the_least_scale_is_an_error(tmp_path: Path) -> None:
    """Elsewhere the scale sinks for ever while every step is skipped."""
    scaler = from_json(tmp_path, initial_scale_power=2, hysteresis=1, min_loss_scale=3)
    assert scales_after(scaler, "x") == [3]
    with pytest.raises(SwapOverflowError):
        scales_after(scaler, "x")
    assert scaler.get_scale() == 3
    assert scales_after(scaler, ".") == [3]


def test_default_scaler_is_torchs(tmp_path: Path) -> None:
    overflows = ".x..x...x.."
    ours = scales_after(GradScaler("cpu", growth_interval=2), overflows)
    theirs = scales_after(torch.amp.GradScaler("cpu", growth_interval=2), overflows)
    assert ours == theirs


def test_state_goes_out_and_in_again(tmp_path: Path) -> None:
    """A resumed run must skip and grow where the other would have."""
    keys = {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 3}
    whole = scales_after(from_json(tmp_path, **keys), "x.xx..x...")
    former, later = from_json(tmp_path, **keys), from_json(tmp_path, **keys)
    begun = scales_after(former, "x.x")
    later.load_state_dict(former.state_dict())
    assert begun + scales_after(later, "x..x...") == whole
    copied = pickle.loads(pickle.dumps(former))
    assert begun + scales_after(copied, "x..x...") == whole
    plain = torch.amp.GradScaler("cpu", init_scale=64.0)
    later.load_state_dict(plain.state_dict())
    assert later.get_scale() == 64.0


def test_scaler_without_fp16_does_nothing(tmp_path: Path) -> None:
    """One loop serves fp16 and bf16."""
    scaler = GradScaler.from_config(config(tmp_path, bf16={"enabled": True}))
    assert not scaler.is_enabled() and scaler.state_dict() == {}
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
