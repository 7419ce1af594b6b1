"""Moving or casting a module whose parameters are swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nvmeswap.errors import SwapUsageError


def refuse_conversions(model: nn.Module) -> None:
    """From here on `model.half()`, `.to(other)`, `.to_empty()` and their kin raise on every module
    with parameters, where they would read the whole model into memory and leave it there; calls
    that change nothing pass."""
    for module in model.modules():
        kinds = {(p.dtype, p.device) for p in module.parameters()}
        if kinds:
            # The one method under all of these; an instance's attribute goes before its class's.
            module._apply = _guarded(module._apply, kinds)  # type: ignore[method-assign]


def _guarded(
    original: Callable[..., nn.Module], kinds: set[tuple[torch.dtype, torch.device]]
) -> Callable[..., nn.Module]:
    def apply(function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for dtype, device in kinds:
            probe = torch.empty(0, dtype=dtype, device=device)
            if function(probe) is not probe:
                raise SwapUsageError(
                    "a module with swapped parameters can't be moved or cast",
                    fix="move or cast it before nvmeswap.zero3.shard",
                )
        return original(function, *args, **kwargs)

    return apply
