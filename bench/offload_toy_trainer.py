"""One side of offload_toy.py.

    {"layers": 10, "hidden": 4096, "device": "cuda", "tier": "cpu", "folder": "..."}   builds it
    {"steps": 10}      trains, and answers mean seconds a step by phases, the losses, peaks
    {"update": true}   one update alone, with the gradients of one backward
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from answers import answer_requests, forget_peak, memory_nbytes
from torch import nn

_BATCH = 512


class Toy(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.layer_norm(layer(x), x.shape[-1:])
        return x


class Trainer:
    """`tier`: where everything is between its uses; None: on the device, always."""

    def __init__(
        self, *, layers: int, hidden: int, device: str, tier: str | None, folder: str
    ) -> None:
        torch.manual_seed(0)
        self._on_gpu = device == "cuda"
        self._model = Toy(layers, hidden)
        self._x = torch.randn(_BATCH, hidden).to(device)
        self._y = torch.randn(_BATCH, hidden).to(device)
        self._after_backward: Callable[[], object] = lambda: None
        if tier is None:
            self._model.to(device)
        else:
            from nvmeswap import OffloadManager

            manager = OffloadManager(
                self._model, device, tier=tier, path=Path(folder) if tier == "nvme" else None,
                trainable=tier,
            )
            self._after_backward = manager.after_backward
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def train(self, steps: int) -> dict[str, Any]:
        forget_peak()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = [0.0, 0.0, 0.0]
        losses = []
        for _ in range(steps):
            times_s = [self._now_s()]
            loss = self._loss()
            times_s.append(self._now_s())
            loss.backward()
            self._after_backward()
            times_s.append(self._now_s())
            self._optimizer.step()
            self._optimizer.zero_grad()
            times_s.append(self._now_s())
            seconds = [sum_s + end_s - begin_s for sum_s, begin_s, end_s in zip(
                seconds, times_s[:-1], times_s[1:], strict=True)]
            losses.append(loss.item())
        forward_s, backward_s, update_s = (sum_s / steps for sum_s in seconds)
        host_nbytes = memory_nbytes()["peak_nbytes"]
        return {
            "step_s": forward_s + backward_s + update_s, "forward_s": forward_s,
            "backward_s": backward_s, "update_s": update_s, "losses": losses,
            "host_peak_nbytes": host_nbytes,
            "peak_nbytes": (torch.cuda.max_memory_allocated() if self._on_gpu else host_nbytes),
        }

    def update_alone(self) -> dict[str, float]:
        """A step of which only the update is timed, while nothing else is under way."""
        self._loss().backward()
        self._after_backward()
        begin_s = self._now_s()
        self._optimizer.step()
        taken_s = self._now_s() - begin_s
        self._optimizer.zero_grad()
        return {"update_s": taken_s}

    def _loss(self) -> torch.Tensor:
        return nn.functional.mse_loss(self._model(self._x), self._y)

    def _now_s(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def begin() -> Callable[..., dict[str, Any]]:
    trainer: Trainer | None = None

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal trainer
        if "layers" in request:
            trainer = Trainer(**request)
            return {}
        assert trainer is not None
        return trainer.update_alone() if "update" in request else trainer.train(request["steps"])

    return answer


if __name__ == "__main__":
    answer_requests(begin)
