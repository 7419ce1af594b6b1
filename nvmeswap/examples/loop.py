"""The training loop: plain PyTorch, the same for every place where state may live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from nvmeswap.examples.arguments import Options
from nvmeswap.examples.model import next_token_loss
from nvmeswap.examples.text import Text


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step on this rank; `loss` is the mean over its micro-batches."""

    index: int
    loss: float
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Clock:
    """Seconds since the last look. On a GPU it waits for the work that was queued until now."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.last = time.perf_counter()

    def lap_s(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        lap, self.last = now - self.last, now
        return lap


def train(model: nn.Module, optimizer: Optimizer, text: Text, options: Options) -> Iterator[Step]:
    """Train, yielding each step when it is complete."""
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps)
    for index in range(options.steps):
        clock = Clock(options.device)
        forward_s = backward_s = 0.0
        loss_sum = torch.zeros((), device=options.device)
        for micro_batch in range(options.accumulation):
            inputs, targets = text.batch(
                options.batch_size,
                options.sequence_length,
                seed=options.seed,
                step=index,
                micro_batch=micro_batch,
                rank=dist.get_rank(),
            )
            logits = model(inputs.to(options.device))
            loss = next_token_loss(logits, targets.to(options.device)) / options.accumulation
            forward_s += clock.lap_s()
            loss.backward()
            backward_s += clock.lap_s()
            loss_sum += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield Step(index, loss_sum.item(), forward_s, backward_s, clock.lap_s())
