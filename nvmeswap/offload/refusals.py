"""What can't be offloaded, and where it would go: looked at before anything is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from nvmeswap.errors import SwapConfigError, SwapUsageError


class Manager(Protocol):
    """What is to be known of an `OffloadManager` here."""

    model: nn.Module


def as_device(given: str | torch.device) -> torch.device:
    """The device, by its number. Raises SwapConfigError for one that can't be served."""
    known = 'use "cuda" (or "cuda:1"), or "cpu"'
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise SwapConfigError(
            f"device is {given!r}", key="device", cause=str(error), fix=known
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise SwapConfigError(f"device {device} is not served", key="device", fix=known)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SwapConfigError(
            f"device is {device}, and torch finds no GPU", key="device",
            fix='see torch.cuda.is_available(), or use "cpu"',
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def shares_memory(device: torch.device, unified_memory: bool | Literal["auto"]) -> bool:
    """Whether host and device have one memory: then copies gain nothing."""
    if unified_memory not in ("auto", True, False):
        raise SwapConfigError(
            f"unified_memory is {unified_memory!r}", key="unified_memory",
            fix='use "auto", True or False',
        )
    if unified_memory != "auto":
        return unified_memory
    if device.type == "cuda":
        return bool(torch.cuda.get_device_properties(device).is_integrated)
    return False


def refuse_modules(
    model: nn.Module, manager_of: Callable[[nn.Module], Manager | None]
) -> None:
    """Raise SwapUsageError if a module in it can't be followed, or something moves its weights
    already."""
    for name, module in model.named_modules():
        called = f'"{name or "the model"}"'
        manager = manager_of(module)
        if manager is not None:
            is_part = manager.model is not module
            raise SwapUsageError(
                f"{called} is {'a part of a model that is ' if is_part else ''}offloaded already",
                fix="close() its manager first: nvmeswap.offload.manager_of(module) is it",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise SwapUsageError(
                f"{called} is a {type(module).__name__} of torch.jit, which takes no hooks",
                fix="offload the module that it was made of",
            )
        for attribute in ("_hf_hook", "_diffusers_hook"):
            if hasattr(module, attribute):
                raise SwapUsageError(
                    f"{called} has hooks of another offloading library ({attribute})",
                    fix="remove them first (accelerate: remove_hook_from_module(recurse=True))",
                )


def refuse_processes(model: nn.Module) -> None:
    """Raise SwapUsageError where several processes would each train a model of their own."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if any(parameter.requires_grad for parameter in model.parameters()):
        raise SwapUsageError(
            f"{dist.get_world_size()} processes would each train a model of their own: nothing "
            "here adds up gradients over them",
            fix="use nvmeswap.zero3 or nvmeswap.deepspeed; requires_grad_(False) for inference",
        )
