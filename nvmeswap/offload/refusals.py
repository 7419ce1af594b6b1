"""What can't be offloaded, and where it would go: looked at before anything is moved."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from nvmeswap.errors import SwapConfigError, SwapUsageError


def with_index(device: torch.device) -> torch.device:
    """The device, by its number."""
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
    return device.type == "mps"


def refuse_managed(model: nn.Module, managed: Container[nn.Module]) -> None:
    """Raise SwapUsageError if something moves the weights of a module in it already."""
    for name, module in model.named_modules():
        if module in managed:
            raise SwapUsageError(
                f'"{name or "the model"}" is offloaded already',
                fix="close() its manager first",
            )
        for attribute in ("_hf_hook", "_diffusers_hook"):
            if hasattr(module, attribute):
                raise SwapUsageError(
                    f'"{name or "the model"}" has hooks of another offloading library '
                    f"({attribute})",
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
