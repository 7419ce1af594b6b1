"""Module offload under the names and arguments that other libraries have for it.

Each function makes an `OffloadManager`, which it returns; its docstring says which. Arguments that
nothing depends on here are taken and said so. For a model that is offloaded already the functions
return the manager that it has; the class, as `OffloadManager`, refuses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvmeswap.errors import SwapConfigError
from nvmeswap.offload.manager import OffloadManager, manager_of

_MIB = 1 << 20


class OffloadTrainingManager(OffloadManager):
    """As DiffSynth-Studio's class of this name: leaf modules, frozen weights in host memory.

    Args: `enable_optimizer_cpu_offload`: trained parameters and their gradients are in host memory
    between uses, for an optimizer on the CPU; without it they stay on the device.
    `cpu_offload_split_threshold`, in MB: subtrees up to that size come as one.
    `after_backward()` may be called, and need not be; gradients may be accumulated.
    """

    def __init__(
        self,
        model: nn.Module,
        target_device: str | torch.device = "cuda",
        enable_optimizer_cpu_offload: bool = False,
        cpu_offload_split_threshold: float | None = None,
    ) -> None:
        threshold = cpu_offload_split_threshold
        super().__init__(
            model,
            target_device,
            tier="cpu",
            trainable="cpu" if enable_optimizer_cpu_offload else "resident",
            granularity="leaf" if threshold is None else int(threshold * _MIB),
        )


def enable_layerwise_offload(
    model: nn.Module, device: str | torch.device = "cuda"
) -> OffloadManager:
    """As FastVideo's function of this name: blocks in host memory, the next one brought ahead."""
    return manager_of(model) or OffloadManager(model, device, tier="cpu", granularity="block")


def apply_group_offloading(
    module: nn.Module,
    onload_device: str | torch.device,
    offload_device: str | torch.device = "cpu",
    offload_type: str = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | Path | None = None,
    block_modules: Sequence[str] | None = None,
    exclude_kwargs: Sequence[str] | None = None,
) -> OffloadManager:
    """As diffusers' function of this name: "block_level" is granularity "block" (or the blocks of
    `block_modules`), "leaf_level" is "leaf"; a path is tier "nvme"; with `use_stream` units come
    ahead, `num_blocks_per_group` of them. `low_cpu_mem_usage` leaves memory pageable. Copies never
    block and are always safe, and only tensors of the outermost call are moved: `non_blocking`,
    `record_stream` and `exclude_kwargs` change nothing."""
    found = manager_of(module)
    if found is not None:
        return found
    if torch.device(offload_device).type != "cpu":
        raise SwapConfigError(
            f"offload_device is {offload_device}", key="offload_device",
            fix='use "cpu", with offload_to_disk_path for a drive',
        )
    granularity: Any = {"block_level": "block", "leaf_level": "leaf"}.get(offload_type)
    if granularity is None:
        raise SwapConfigError(
            f"offload_type is {offload_type!r}", key="offload_type",
            fix='use "block_level" or "leaf_level"',
        )
    if block_modules is not None and granularity == "block":
        granularity = [f"{name}.*" for name in block_modules]
    return OffloadManager(
        module,
        onload_device,
        path=offload_to_disk_path,
        granularity=granularity,
        prefetch=(num_blocks_per_group or 1) if use_stream else 0,
        pin_memory=not low_cpu_mem_usage,
    )


def cpu_offload(
    model: nn.Module,
    execution_device: str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> OffloadManager:
    """As accelerate's function of this name: modules with weights of their own in host memory;
    those of `preload_module_classes` come whole. Returns the manager, not the model. `state_dict`
    has nothing to give: the model's own values are kept."""
    if state_dict is not None:
        warnings.warn("cpu_offload keeps the model's own values; state_dict is not used",
                      stacklevel=2)
    return _like_accelerate(model, None, execution_device, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: str | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> OffloadManager:
    """As accelerate's function of this name, in a folder below `offload_dir` that is this
    process's alone: what other runs left there is never read. Returns the manager, not the
    model."""
    return _like_accelerate(
        model, offload_dir, execution_device, offload_buffers, preload_module_classes
    )


def _like_accelerate(
    model: nn.Module,
    path: str | Path | None,
    execution_device: str | torch.device | None,
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> OffloadManager:
    found = manager_of(model)
    if found is not None:
        return found
    classes = set(preload_module_classes or ())
    whole = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    if execution_device is None:
        first = next(model.parameters(), None)
        execution_device = "cuda" if torch.cuda.is_available() else "cpu"
        if first is not None and first.is_cuda:
            execution_device = first.device
    return OffloadManager(
        model,
        execution_device,
        path=path,
        granularity=whole or "leaf",
        buffers="swap" if offload_buffers else "resident",
    )
