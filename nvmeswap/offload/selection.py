"""Which of a managed model: tensors by name, and units that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from nvmeswap.errors import SwapUsageError
from nvmeswap.offload.block import Block, ManagedTensor
from nvmeswap.offload.build import Built
from nvmeswap.offload.window import Unit


def tensors_named(
    built: Built, names: Sequence[str]
) -> dict[Unit, dict[Block, list[ManagedTensor]]]:
    """The tensors that are, or are in modules that are, called by one of these names or patterns,
    by unit and block; all, if there are no names. Raises SwapUsageError for a name of nothing."""
    unknown = set(names)
    chosen: dict[Unit, dict[Block, list[ManagedTensor]]] = {}
    for unit in built.units:
        for block, managed in unit.tensors:
            fits = {name for name in names if _means(name, managed.member.name)}
            unknown -= fits
            if fits or not names:
                chosen.setdefault(unit, {}).setdefault(block, []).append(managed)
    others = [each.member.name for each in built.residents]
    unknown -= {name for name in unknown if any(_means(name, other) for other in others)}
    if unknown:
        raise SwapUsageError(
            f'the model has no module or tensor "{min(unknown)}"',
            fix="use names of model.named_modules() or model.state_dict()",
        )
    return chosen


def _means(pattern: str, name: str) -> bool:
    """Whether a pattern is of this tensor, or of a module that it is in."""
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1)
    )


def choose_staying(units: Sequence[Unit], nbytes: int) -> list[Unit]:
    """Units that together fit `nbytes`, spread evenly: while one that stays computes, one that does
    not can be copied."""
    frozen = [
        unit
        for unit in units
        if unit.nbytes and not any(managed.tensor.requires_grad for _, managed in unit.tensors)
    ]
    total_nbytes = sum(unit.nbytes for unit in frozen)
    chosen: list[Unit] = []
    due_nbytes, left_nbytes = 0.0, nbytes
    for unit in frozen:
        due_nbytes += unit.nbytes * min(1.0, nbytes / total_nbytes)
        if due_nbytes >= unit.nbytes * 0.999 and unit.nbytes <= left_nbytes:
            chosen.append(unit)
            due_nbytes -= unit.nbytes
            left_nbytes -= unit.nbytes
    return chosen
