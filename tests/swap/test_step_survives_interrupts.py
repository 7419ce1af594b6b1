"""Ctrl-C at any moment of a step: taking the step again gives the values of an undisturbed run."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.swap.conftest import Bench, set_gradients

SIZES = [37, 5000, 30_000]
STEPS = 20


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], None]]:
    """Raises KeyboardInterrupt in this thread after some seconds, as Ctrl-C does; 0 takes it
    back."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    yield lambda delay_s: signal.setitimer(signal.ITIMER_REAL, delay_s)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupted_steps_taken_again_are_exact(
    bench: Bench,
    parameters: Callable[..., list[torch.nn.Parameter]],
    interrupts: Callable[[float], None],
) -> None:
    """Else a notebook user who stops a cell trains on with updates that were lost or made twice."""
    ours = parameters(SIZES, dtype=torch.bfloat16)
    theirs = parameters(SIZES, dtype=torch.bfloat16)
    swapped, reference = bench.adamw(ours, buffer_count=2), bench_in_ram(theirs)
    delays = random.Random(0)
    interrupted = 0
    for step in range(STEPS):
        set_gradients(ours, step)
        delay_s = delays.uniform(0.0002, 0.01)
        try:
            interrupts(delay_s)
            swapped.step()
            interrupts(0)
        except KeyboardInterrupt:
            interrupts(0)
            interrupted += 1
            done = int(swapped.state[ours[0]].get("step", 0)) == step + 1
            if swapped.step_is_unfinished or not done:
                swapped.step()
        reference(step)
    assert interrupted > STEPS // 4
    assert all(map(torch.equal, ours, theirs))


def bench_in_ram(params: list[torch.nn.Parameter]) -> Callable[[int], None]:
    """A step of fp32 masters in RAM, rounded into bf16 parameters."""
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in params]
    resident = torch.optim.AdamW(masters, fused=True)

    def step(number: int) -> None:
        set_gradients(params, number)
        for master, parameter in zip(masters, params, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        resident.step()
        with torch.no_grad():
            for master, parameter in zip(masters, params, strict=True):
                parameter.copy_(master)

    return step
