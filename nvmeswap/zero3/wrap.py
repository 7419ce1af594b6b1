"""`shard()`: ZeRO-3 with parameters and optimizer state on NVMe, for a plain PyTorch loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nvmeswap.config import Config, OffloadDevice, OptimizerBlock
from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.memory.heap import release_freed_memory
from nvmeswap.memory.pool import Pool
from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.params import ParamPlacement, PartitionedParamSwapper
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace, new_run_name
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.entries import Entry, entries_of
from nvmeswap.zero3.guard import refuse_conversions
from nvmeswap.zero3.home import ShardedHome
from nvmeswap.zero3.optimizer import ShardedAdamW
from nvmeswap.zero3.swap import ZeroSwap
from nvmeswap.zero3.tensor import SwappedTensor

Model = TypeVar("Model", bound=nn.Module)

_ADAMW_OPTIONS = frozenset({"lr", "betas", "eps", "weight_decay", "maximize"})


def shard(
    model: Model,
    config: Mapping[str, Any] | str | Path,
    mesh: DeviceMesh | None = None,
    optimizer: tuple[type[Optimizer], Mapping[str, Any]] | None = None,
) -> tuple[Model, Optimizer]:
    """Shard a model over all ranks (FSDP2) and swap its shards as a DeepSpeed JSON says.

        model, optimizer = nvmeswap.zero3.shard(model, "ds_config.json")
        loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        model: built in memory, on the CPU or a GPU; changed in place. If `fully_shard` was applied
            to it already, its grouping and precision stay; else every element of its outermost
            ModuleLists becomes a group.
        config: dict or path; `nvmeswap.config` lists what is served.
        mesh: the device mesh of FSDP2; None: all ranks. World size 1 needs no launcher.
        optimizer: (class, options) instead of the configuration's `optimizer` block.
    Returns the same model, and an optimizer whose `swap` has `stats()` and `close()`; with both
    offload devices "none", plain FSDP2 and torch.optim.AdamW(fused=True).
    Raises: SwapConfigError, SwapPathError, SwapBudgetError and SwapSpaceError before training.
    Blocking: writes all shards and the first optimizer state.
    """
    settings = Config.load(config)
    options = _adamw_options(settings.optimizer, optimizer)
    device = _device_of(model)
    _ensure_process_group(device)
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    fsdp.shard_by_blocks(model, mesh, _precision(settings))
    zero = settings.zero_optimization
    if zero.offload_optimizer.device is OffloadDevice.NONE:
        return model, torch.optim.AdamW(model.parameters(), fused=True, **options)
    return model, _swapped(model, settings, mesh, device, options)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is; raises SwapUsageError for one that can't be sharded."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise SwapUsageError(
            "the model has no parameter to train",
            fix="set requires_grad_(True) on what is to be trained",
        )
    locals_ = [fsdp.local_tensor(p) for p in parameters if isinstance(p, DTensor)]
    if any(isinstance(local, SwappedTensor) for local in locals_):
        raise SwapUsageError("the model is swapped already", fix="call shard() once a model")
    if any(parameter.is_meta for parameter in parameters):
        raise SwapUsageError(
            "the model has parameters on the meta device",
            fix="build it in memory: models are not materialised here yet",
        )
    return parameters[0].device


def _swapped(
    model: nn.Module,
    settings: Config,
    mesh: DeviceMesh,
    device: torch.device,
    options: Mapping[str, Any],
) -> ShardedAdamW:
    zero = settings.zero_optimization
    entries = entries_of(model)
    agreement = Agreement(None, device)
    home = ShardedHome(model, entries, agreement)
    moves_params = zero.offload_param.device is not OffloadDevice.NONE
    home.swaps_params = moves_params
    trained = [entry.parameter for entry in entries if entry.parameter.requires_grad]
    optimizer = ShardedAdamW.over(trained, home, **options)
    assert isinstance(optimizer, ShardedAdamW)
    layouts = optimizer.lay_out(zero.sub_group_size)
    placement = _placement(settings)
    pools = _pools(settings, placement, entries, layouts, device)
    space = SwapSpace(
        Placement(settings.nvme_path, _run_name(), dist.get_rank(), dist.get_world_size()),
        pools,
        swap=settings.nvmeswap,
        aio=settings.aio,
        pin_memory=zero.offload_param.pin_memory and zero.offload_optimizer.pin_memory,
    )
    try:
        filled = _fill(
            model, optimizer, home, entries, agreement, space, layouts, placement, mesh, settings
        )
    except BaseException:
        space.close()
        raise
    release_freed_memory()
    return filled


def _fill(
    model: nn.Module,
    optimizer: ShardedAdamW,
    home: ShardedHome,
    entries: Sequence[Entry],
    agreement: Agreement,
    space: SwapSpace,
    layouts: Sequence[Any],
    placement: ParamPlacement,
    mesh: DeviceMesh,
    settings: Config,
) -> ShardedAdamW:
    """Write everything to its home, then free the resident shards."""
    zero = settings.zero_optimization
    params = None
    if home.swaps_params:
        params = PartitionedParamSwapper(
            [entry.spec for entry in entries],
            placement,
            store=space.store if placement.on_nvme else None,
            pool=space.pools["parameters"],
            timeout_s=space.timeout_s,
        )
        for entry in entries:
            assert entry.local is not None
            params.write(entry.key, entry.local.view(-1))
    home.params = params
    on_nvme = zero.offload_optimizer.device is OffloadDevice.NVME
    optimizer.attach(
        PipelinedOptimizerSwapper(
            layouts,
            store=space.store if on_nvme else None,
            pool=space.pools["optimizer state"],
            timeout_s=space.timeout_s,
        )
    )
    optimizer.norm_group = fsdp.shard_group(entries[0].record)
    optimizer.norm_device = agreement.device
    optimizer.swap = ZeroSwap(
        space=space, params=params, optimizer=optimizer, home=home, agreement=agreement
    )
    for entry in entries:
        if params is not None:
            optimizer.swap.take_over(entry)
        if entry.parameter.requires_grad:
            entry.parameter.register_post_accumulate_grad_hook(home.take_gradient)
    if params is not None:
        refuse_conversions(model)
    home.gradients.use_memory(_gradient_memory(space.pools["gradients"], entries))
    return optimizer


def _pools(
    settings: Config,
    placement: ParamPlacement,
    entries: Sequence[Entry],
    layouts: Sequence[Any],
    device: torch.device,
) -> dict[str, PoolRequest]:
    zero = settings.zero_optimization
    param_classes = []
    if zero.offload_param.device is not OffloadDevice.NONE:
        param_classes = placement.slot_classes([entry.spec for entry in entries])
    on_nvme = zero.offload_optimizer.device is OffloadDevice.NVME
    buffer_count = zero.offload_optimizer.buffer_count if on_nvme else None
    gradient_sizes = [
        entry.numel * entry.parameter.dtype.itemsize
        for entry in entries
        if entry.parameter.requires_grad and device.type != "cpu"
    ]
    return {
        "parameters": PoolRequest(param_classes, shrinks=placement.on_nvme),
        "optimizer state": PoolRequest(
            PipelinedOptimizerSwapper.slot_classes(layouts, buffer_count), shrinks=on_nvme
        ),
        "gradients": PoolRequest(exact_slot_classes(gradient_sizes), shrinks=False),
    }


def _gradient_memory(pool: Pool | None, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """Page-locked host memory for each gradient that comes from a GPU."""
    if pool is None:
        return {}
    memory = {}
    for entry in entries:
        if entry.parameter.requires_grad and entry.numel:
            dtype = entry.parameter.dtype
            nbytes = entry.numel * dtype.itemsize
            slot = pool.acquire(nbytes, holder=f"gradient of {entry.key}", timeout_s=0)
            memory[entry.key] = slot.memory[:nbytes].view(dtype)
    return memory


def _placement(settings: Config) -> ParamPlacement:
    param = settings.zero_optimization.offload_param
    return ParamPlacement(
        on_nvme=param.device is OffloadDevice.NVME,
        min_swap_nbytes=settings.nvmeswap.min_swap_nbytes,
        buffer_count=param.buffer_count,
        largest_slot_numel=param.buffer_size,
        max_in_cpu=param.max_in_cpu,
    )


def _precision(settings: Config) -> MixedPrecisionPolicy:
    if settings.bf16.enabled:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _adamw_options(
    block: OptimizerBlock | None, given: tuple[type[Optimizer], Mapping[str, Any]] | None
) -> dict[str, Any]:
    """The options of AdamW, from the argument or the JSON; anything else is refused by name."""
    if given is not None:
        kind, options = given[0].__name__, dict(given[1])
        served = given[0] in (torch.optim.AdamW, SwappedAdamW)
    else:
        block = block or OptimizerBlock()
        kind, options = block.type, dict(block.params)
        served = kind.lower() in ("adamw", "adam") and options.pop("adam_w_mode", True)
    if not served:
        raise SwapConfigError(
            f"optimizer {kind} is not served", key="optimizer.type", fix="use AdamW"
        )
    options = {name: value for name, value in options.items() if value not in ("auto", None)}
    if kind.lower() == "adam":
        options.setdefault("weight_decay", 0.0)  # DeepSpeed's "Adam" is AdamW without decay
    for harmless in ("fused", "foreach", "torch_adam"):
        options.pop(harmless, None)
    unknown = sorted(set(options) - _ADAMW_OPTIONS)
    if unknown:
        raise SwapConfigError(
            f"AdamW option {unknown[0]} is not served",
            key=f"optimizer.params.{unknown[0]}",
            fix="served: " + ", ".join(sorted(_ADAMW_OPTIONS)),
        )
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return options


def _ensure_process_group(device: torch.device) -> None:
    """torchrun's when it launched us, else a group of one."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _run_name() -> str:
    """Rank 0's, for all."""
    name = [new_run_name()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(name, src=0)
    return name[0]
