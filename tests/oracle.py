"""The oracle: a swapped run equals the same run in RAM, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """What a run leaves to compare: a number or more a step, and the final weights by name."""

    losses: Sequence[float]
    weights: Mapping[str, torch.Tensor]


def first_difference(ours: Run, reference: Run) -> str | None:
    """Names the first step, tensor and element that differ; None if nothing does."""
    for step, (mine, theirs) in enumerate(zip(ours.losses, reference.losses, strict=True)):
        if mine != theirs:
            return f"number {step}: {mine!r} instead of {theirs!r}"
    assert list(ours.weights) == list(reference.weights)
    for name, expected in reference.weights.items():
        weight = ours.weights[name]
        if weight.dtype is not expected.dtype or weight.shape != expected.shape:
            return f"{name}: {weight.dtype} {tuple(weight.shape)}"
        unequal = (weight != expected).flatten().nonzero()
        if len(unequal):
            place = int(unequal[0])
            got, wanted = weight.flatten()[place].item(), expected.flatten()[place].item()
            return f"{name}, element {place}: {got!r} instead of {wanted!r}"
    return None
