"""From a sharded model in memory to one whose shards are swapped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nvmeswap.config import Config, OffloadDevice, ZeroConfig, elements
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.memory.heap import give_large_blocks_back_when_freed, release_freed_memory
from nvmeswap.memory.pool import Pool
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.sizing import pool_request
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace
from nvmeswap.swap.sub_group import SubGroupLayout
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.entries import Entry, entries_of
from nvmeswap.zero3.guard import guard_module_calls, refuse_other_optimizers
from nvmeswap.zero3.home import ShardedHome
from nvmeswap.zero3.materialise import FirstValues, Materialiser
from nvmeswap.zero3.optimizer import ShardedOptimizer
from nvmeswap.zero3.placement import keep_resident
from nvmeswap.zero3.swap import ZeroSwap


def swap_shards(
    model: nn.Module,
    settings: Config,
    *,
    run: str,
    agreement: Agreement,
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    values: FirstValues,
) -> ShardedOptimizer:
    """Write every shard and the first optimizer state to their homes, then free the shards.

    Raises SwapBudgetError, SwapPathError, SwapSpaceError and their kin; then the model is sharded,
    in memory or on meta, and otherwise as it was (but for weights that were being loaded over
    others).
    """
    zero = settings.zero_optimization
    swaps_params = zero.offload_param.device is not OffloadDevice.NONE
    entries = entries_of(model, swapped=swaps_params)
    keep_resident(entries, settings.nvmeswap, agreement.device)
    with closing(Materialiser(model, entries, values)) as first:
        home = ShardedHome(model, entries, agreement)
        trained = [entry.parameter for entry in entries if entry.parameter.requires_grad]
        optimizer: ShardedOptimizer = ShardedOptimizer.over(
            cls, trained, home, update_device=settings.nvmeswap.update_device, **options
        )
        layouts = optimizer.lay_out(zero.sub_group_size)
        space = SwapSpace(
            Placement(settings.nvme_paths, run, dist.get_rank(), dist.get_world_size()),
            pool_requests(settings, entries, layouts, agreement.device),
            swap=settings.nvmeswap,
            aio=settings.aio,
            pin_memory=zero.offload_param.pin_memory and zero.offload_optimizer.pin_memory,
        )
        try:
            params = _parameter_swapper(settings, entries, space) if swaps_params else None
            home.params = params
            _give_values(optimizer, _state_swapper(zero, layouts, space), home, first)
            home.gradients.use_memory(_gradient_memory(space.pools["gradients"], entries))
            optimizer.swap = ZeroSwap(
                space=space, params=params, optimizer=optimizer, home=home, agreement=agreement
            )
            optimizer.norm_group = fsdp.shard_group(entries[0].record)
            optimizer.norm_device = agreement.device
            optimizer.gradient_clipping = settings.gradient_clipping
            optimizer.expects_scaler = settings.fp16.enabled
            first.install()
            _let_go(model, entries, optimizer, home)
            groups = _groups(model, entries)
            if params is not None:
                params.expect(_likely_order(groups))
            optimizer.swap.copy_ahead(groups)
        except BaseException:
            space.close()
            raise
    if agreement.device.type == "cpu":
        give_large_blocks_back_when_freed()
    release_freed_memory()
    return optimizer


def _give_values(
    optimizer: ShardedOptimizer,
    swapper: PipelinedOptimizerSwapper,
    home: ShardedHome,
    first: Materialiser,
) -> None:
    """One pass over the model: its masters ask for values, and what passes by is written."""
    if home.params is None:
        first.finish()  # parameters that stay must be there before their optimizer is
    else:
        first.write_to(home.params)
    home.first_values = first.values
    optimizer.attach(swapper)
    first.finish()
    home.first_values = None


def _state_swapper(
    zero: ZeroConfig, layouts: Sequence[SubGroupLayout], space: SwapSpace
) -> PipelinedOptimizerSwapper:
    on_nvme = zero.offload_optimizer.device is OffloadDevice.NVME
    return PipelinedOptimizerSwapper(
        layouts,
        store=space.store if on_nvme else None,
        pool=space.pools["optimizer state"],
        timeout_s=space.timeout_s,
        buffer_count=zero.offload_optimizer.buffer_count,
        ratio=zero.offload_optimizer.ratio,
        thread_count=update_thread_count(zero.offload_optimizer.cpuadam_cores_perc),
    )


def update_thread_count(share: float | None) -> int:
    """Threads of the update, for a share of this process's cores."""
    return 1 if share is None else max(1, int(share * len(os.sched_getaffinity(0))))


def _parameter_swapper(
    settings: Config, entries: Sequence[Entry], space: SwapSpace
) -> PartitionedParamSwapper:
    swapped = [entry for entry in entries if entry.swapped]
    placement = param_placement(settings, swapped)
    return PartitionedParamSwapper(
        [entry.spec for entry in swapped],
        placement,
        store=space.store if placement.on_nvme else None,
        pool=space.pools["parameters"],
        timeout_s=space.timeout_s,
    )


def _let_go(
    model: nn.Module, entries: Sequence[Entry], optimizer: ShardedOptimizer, home: ShardedHome
) -> None:
    """Free the resident shards; from here on gradients go to the host as they come."""
    for entry in entries:
        if entry.swapped:
            optimizer.swap.take_over(entry)
        if entry.parameter.requires_grad:
            entry.parameter.register_post_accumulate_grad_hook(home.take_gradient)
    optimizer.take_parameters_as_they_are()
    guard_module_calls(model, home)
    refuse_other_optimizers(home)


def _groups(model: nn.Module, entries: Sequence[Entry]) -> list[list[Entry]]:
    """What is gathered together."""
    by_record = {id(entry.record): entry for entry in entries}
    return [
        [by_record[id(record)] for record in fsdp.params_of(module) if id(record) in by_record]
        for module in fsdp.fsdp_modules(model)
    ]


def _likely_order(groups: Sequence[Sequence[Entry]]) -> list[str]:
    """Of the first step: forward, and backward, for which the root's group stays gathered."""
    keys = [[entry.key for entry in group if entry.swapped] for group in groups]
    return [key for group in (*keys, *reversed(keys[1:])) for key in group]


def pool_requests(
    settings: Config,
    entries: Sequence[Entry],
    layouts: Sequence[SubGroupLayout],
    device: torch.device,
) -> dict[str, PoolRequest]:
    """The slots that a rank asks for, by pool; `device` is where the model computes."""
    zero = settings.zero_optimization
    swapped = [entry for entry in entries if entry.swapped]
    placement = param_placement(settings, swapped)
    on_nvme = zero.offload_optimizer.device is OffloadDevice.NVME
    gradient_sizes = [
        entry.numel * entry.parameter.dtype.itemsize
        for entry in entries
        if entry.parameter.requires_grad and device.type != "cpu"
    ]
    return {
        "parameters": PoolRequest(
            placement.slot_classes([entry.spec for entry in swapped]), shrinks=placement.on_nvme),
        "optimizer state": pool_request(
            layouts,
            buffer_count=zero.offload_optimizer.buffer_count,
            ratio=zero.offload_optimizer.ratio if on_nvme else 0.0,
            budget_nbytes=settings.nvmeswap.host_memory_nbytes,
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


def param_placement(settings: Config, swapped: Sequence[Entry]) -> ParamPlacement:
    """As the JSON says, for those entries that are swapped."""
    param = settings.zero_optimization.offload_param
    least_nbytes = settings.nvmeswap.min_swap_nbytes
    largest_itemsize = max(
        (each.store_dtype.itemsize for each in swapped if each.spec.nbytes >= least_nbytes),
        default=1,
    )
    return ParamPlacement(
        on_nvme=param.device is OffloadDevice.NVME,
        min_swap_nbytes=least_nbytes,
        buffer_count=param.buffer_count,
        largest_slot_numel=param.buffer_size,
        max_in_cpu=elements(param.max_in_cpu, itemsize=largest_itemsize),
    )
