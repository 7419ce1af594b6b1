"""How long forward and backward take in memory: a few blocks of the user's model, through FSDP2 and
the cpu tier, so that gathering and the gradients' way to the host are in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import nvmeswap.zero3
from nvmeswap.cli.plan.models import from_factory, function
from nvmeswap.cli.plan.passes import Compute
from nvmeswap.config import Config
from nvmeswap.errors import SwapConfigError

_BLOCKS = 4  # arbitrary: so many that what is not in blocks weighs little
_LOOPS = 5


class ComputeTrial:
    """A shortened model in memory, ready to be timed.

        with_blocks = ComputeTrial("train:model", "train:batch", settings, device="cpu")
        compute = with_blocks.measure()

    `factory` is called on the meta device, `batch` on `device`; the model is called with what that
    returns (a tuple: positional, a dict: by name), and returns a loss, something with a `loss`, or
    a tensor. Blocking: everything. Makes a process group of one. Raises SwapConfigError.
    """

    def __init__(self, factory: str, batch: str, settings: Config, *, device: str) -> None:
        model = from_factory(factory)
        whole_numel = _numel(model)
        for blocks in _lists_of(model):
            del blocks[_BLOCKS:]
        self._scale = whole_numel / _numel(model)
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.02, 0.02)
            for buffer in model.buffers():
                buffer.zero_()
        self._model, self._optimizer = nvmeswap.zero3.shard(model, _in_memory(settings))
        with torch.device(device):
            self._batch = function(batch, key="--batch")()

    def measure(self, loops: int = _LOOPS) -> Compute:
        """The whole model's, by its number of elements. Medians."""
        self.sample()  # the first one is slower
        samples = [self.sample() for _ in range(loops)]
        return Compute(
            statistics.median(each.forward_s for each in samples),
            statistics.median(each.backward_s for each in samples),
        )

    def sample(self) -> Compute:
        """One pass."""
        began = _now()
        loss = _loss(self._called())
        forward = _now()
        loss.backward()
        backward = _now()
        self._optimizer.zero_grad()
        return Compute(self._scale * (forward - began), self._scale * (backward - forward))

    def close(self) -> None:
        """Give the memory back."""
        self._optimizer.close()  # type: ignore[attr-defined]

    def _called(self) -> Any:
        if isinstance(self._batch, Mapping):
            return self._model(**self._batch)
        given = self._batch if isinstance(self._batch, (tuple, list)) else (self._batch,)
        return self._model(*given)


def _loss(result: Any) -> torch.Tensor:
    found = getattr(result, "loss", None)
    if found is None:
        found = getattr(result, "logits", result)
    if not isinstance(found, torch.Tensor):
        raise SwapConfigError(
            f"the model returned a {type(found).__name__}", key="--batch",
            fix="return a tensor, or something with a loss; labels belong into the batch",
        )
    return found if found.dim() == 0 else found.float().square().mean()


def _lists_of(module: nn.Module) -> list[nn.ModuleList]:
    """The outermost lists of blocks with more than a few."""
    found: list[nn.ModuleList] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > _BLOCKS:
            found.append(child)
        else:
            found.extend(_lists_of(child))
    return found


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _in_memory(settings: Config) -> dict[str, Any]:
    cpu = {"device": "cpu", "pin_memory": False}
    return {
        "zero_optimization": {"stage": 3, "offload_param": cpu, "offload_optimizer": cpu},
        "bf16": {"enabled": settings.bf16.enabled},
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
