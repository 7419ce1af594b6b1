"""Calls of nn.Module that would do the wrong thing to swapped parameters without a word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nvmeswap.errors import SwapUsageError
from nvmeswap.zero3.home import ShardedHome


def guard_module_calls(model: nn.Module, home: ShardedHome) -> None:
    """From here on, on the model and every module in it:

    - `half()`, `to(other)`, `to_empty()` and their kin raise, where they would read the parameters
      into memory and leave them there; calls that change nothing pass;
    - `zero_grad()` forgets the gradients that are in host memory, too;
    - transformers' and PEFT's `save_pretrained()` raises where it was given no values to write.
    """
    for module in model.modules():
        kinds = {(p.dtype, p.device) for p in module.parameters()}
        if kinds:
            # Instance attributes: they go before the class's. All conversions end in _apply.
            module._apply = partial(_apply, module._apply, kinds)  # type: ignore[method-assign]
            module.zero_grad = partial(_zero_grad, module, module.zero_grad, home)  # type: ignore[method-assign]
        if hasattr(module, "save_pretrained"):
            original: Any = module.save_pretrained
            module.save_pretrained = partial(_save_pretrained, original)  # type: ignore[assignment]


def _apply(
    original: Callable[..., nn.Module],
    kinds: set[tuple[torch.dtype, torch.device]],
    function: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    for dtype, device in kinds:
        probe = torch.empty(0, dtype=dtype, device=device)
        if function(probe) is not probe:
            raise SwapUsageError(
                "a module with swapped parameters can't be moved or cast",
                fix="move or cast it before nvmeswap.zero3.shard",
            )
    return original(function, *args, **kwargs)


def _zero_grad(
    module: nn.Module,
    original: Callable[..., None],
    home: ShardedHome,
    set_to_none: bool = True,
) -> None:
    original(set_to_none)
    home.zero_gradients(set_to_none=set_to_none, parameters=module.parameters())


def _save_pretrained(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise SwapUsageError(
            "save_pretrained would find no values in the model: they are in the swap space",
            fix="give it state_dict={name: value.full_tensor().clone(), ...} from "
            "model.state_dict(), gathered on all ranks",
        )
    return original(*args, **kwargs)
