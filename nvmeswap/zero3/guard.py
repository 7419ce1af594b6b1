"""Calls of torch that would do the wrong thing to swapped parameters without a word."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.home import ShardedHome

_homes: weakref.WeakSet[ShardedHome] = weakref.WeakSet()


def refuse_other_optimizers(home: ShardedHome) -> None:
    """From here on, another optimizer's `step()` over these parameters raises: it would have states
    of its own, and what it writes to resident ones would pass for an edit of their masters."""
    _look_at_every_step()
    _homes.add(home)


def is_trained_here(parameter: torch.Tensor) -> bool:
    """True for one that an optimizer of this package has, also if it is not swapped."""
    return any(home.owns(parameter) for home in list(_homes))


@cache
def _look_at_every_step() -> None:
    register_optimizer_step_pre_hook(_refuse_if_not_ours)


def _refuse_if_not_ours(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, SwappedOptimizer):
        return
    homes = list(_homes)
    for group in optimizer.param_groups:
        for parameter, home in product(group["params"], homes):
            if home.owns(parameter) and parameter.requires_grad:
                raise SwapUsageError(
                    f"{type(optimizer).__name__} was built over parameters that nvmeswap trains",
                    fix="give nvmeswap.zero3.shard the class, and use the optimizer it returns",
                )


def guard_module_calls(model: nn.Module, home: ShardedHome) -> None:
    """From here on, on the model and every module in it:

    - `half()`, `to(other)`, `to_empty()` and their kin raise, where they would read the parameters
      into memory and leave them there; calls that change nothing pass;
    - `zero_grad()` forgets the gradients that are in host memory, too;
    - transformers' and PEFT's `save_pretrained()` raises where it was given no values to write;
    - `load_state_dict(assign=True)` raises: it would leave resident parameters instead;
    - a forward after a backward that an error ended raises, one that an error ends leaves FSDP2
      clean, and the first one may be in inference mode.
    """
    _watch_forward(model, home)
    for module in model.modules():
        kinds = {(p.dtype, p.device) for p in module.parameters()}
        if kinds:
            # Instance attributes: they go before the class's. All conversions end in _apply.
            module._apply = partial(_apply, module._apply, kinds)  # type: ignore[method-assign]
            module.register_load_state_dict_pre_hook(_refuse_assignment)
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
    home.refuse_while_updating()
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


def _refuse_assignment(
    module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise SwapUsageError(
            "load_state_dict(assign=True) would put resident parameters into the place of swapped "
            "ones",
            fix="leave out assign: values are copied to where the parameters live",
        )


def _watch_forward(model: nn.Module, home: ShardedHome) -> None:
    def before(module: nn.Module, _: Any) -> None:
        if torch.is_inference_mode_enabled():
            fsdp.gather_once_outside_inference_mode(module)
        home.refuse_half_a_pass()
        home.refuse_while_updating()

    def after(module: nn.Module, *_: Any) -> None:
        fsdp.abandon_forward(module)

    disable: Callable[[Any], Any] = torch.compiler.disable  # there is nothing in them to compile
    model.register_forward_pre_hook(disable(before), prepend=True)
    model.register_forward_hook(disable(after), always_call=True)
