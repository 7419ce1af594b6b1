"""All that nvmeswap knows of FSDP2's inside: the only file with its private names.

Written against torch 2.11 to 2.14 (docs/design.md, "FSDP2").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvmeswap.errors import SwapUsageError


def shard_by_blocks(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    keeps_gathered: bool = False,
) -> None:
    """`fully_shard` every element of the outermost ModuleLists and Sequentials that has parameters,
    then the model. A model that is sharded already stays as its user did it. `keeps_gathered`: what
    forward has gathered serves backward, too."""
    if isinstance(model, FSDPModule):
        reshard_all(model)
        return
    _refuse_scalars(model)
    _refuse_ties_across_groups(model)
    reshard = False if keeps_gathered else None
    for module in [*_blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _refuse_scalars(model: nn.Module) -> None:
    """FSDP2 refuses them too, but some blocks are sharded by then (CLIP's temperature is one)."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise SwapUsageError(
                f"parameter {name!r} is a scalar, which can't be sharded",
                fix="replace it by nn.Parameter(parameter.detach().reshape(1)) before shard()",
            )


def _refuse_ties_across_groups(model: nn.Module) -> None:
    """FSDP2 notices them only in the first forward, and before 2.12 unties them without a word."""
    blocks = list(_blocks(model))
    owners: dict[int, int] = {}
    inside = {id(module) for block in blocks for module in block.modules()}
    groups = [*(list(block.modules()) for block in blocks)]
    groups.append([module for module in model.modules() if id(module) not in inside])
    for index, modules in enumerate(groups):
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if owners.setdefault(id(parameter), index) != index:
                    raise SwapUsageError(
                        f"parameter {name!r} is tied across blocks that are sharded apart",
                        fix="apply fully_shard([first, second]) to them before shard()",
                    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for child in children:
            if type(child).forward is nn.Module.forward:  # a container: nobody calls it
                yield from _blocks(child)
            elif any(True for _ in child.parameters()):
                yield child
        return
    for child in children:
        yield from _blocks(child)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Every module that `fully_shard` was applied to."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_params(model: nn.Module) -> list[Any]:
    """FSDP2's record of every sharded parameter, in the order of the modules.

    Raises SwapUsageError for settings of FSDP2 that swapped parameters can't serve.
    """
    return [record for module in fsdp_modules(model) for record in params_of(module)]


def params_of(module: Any) -> list[Any]:
    """The same of one module that `fully_shard` was applied to: what is gathered with it."""
    records = []
    for group in _groups_of(module):
        if group._use_post_forward_mesh:
            raise SwapUsageError(
                "reshard_after_forward=<int> keeps shards on the device",
                fix="use reshard_after_forward True, False or None",
            )
        for record in group.fsdp_params:
            if record.offload_to_cpu:
                raise SwapUsageError(
                    "CPUOffloadPolicy and nvmeswap both move the shards",
                    fix="leave offload_policy out of fully_shard",
                )
            records.append(record)
    return records


def _groups(model: nn.Module) -> list[Any]:
    return [group for module in fsdp_modules(model) for group in _groups_of(module)]


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch 2.11 has one, or none
    return [] if group is None else [group]


def local_tensor(sharded: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a sharded parameter or gradient, not a copy."""
    assert isinstance(sharded, DTensor)
    local: torch.Tensor = sharded._local_tensor
    return local


def set_local_tensor(gradient: torch.Tensor, local: torch.Tensor) -> None:
    """Put `local` into the place of the rank's own part of a gradient."""
    assert isinstance(gradient, DTensor)
    gradient._local_tensor = local


def replace_local_tensor(record: Any, local: torch.Tensor, padded_flat: torch.Tensor) -> None:
    """Put `local` into the place of the rank's part, `padded_flat` into that of its padded copy
    (read only if FSDP2 ever loses the all-gather methods). Nothing else holds what was there. A
    parameter on the meta device goes to that of `local`, as the same object."""
    parameter = record.sharded_param
    if parameter.device.type == "meta":
        real = torch.empty_like(parameter, device=local.device)
        torch.utils.swap_tensors(
            parameter, nn.Parameter(real, requires_grad=parameter.requires_grad)
        )
    record.sharded_param._local_tensor = local
    record._sharded_param_data = padded_flat
    record._init_extensions()


def part_of_whole(record: Any) -> tuple[slice, ...]:
    """Which part of the whole parameter this rank holds, a slice for each dimension. Raises
    SwapUsageError where that is not one block."""
    parameter = record.sharded_param
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(local_tensor(parameter).shape):
        raise SwapUsageError(
            f"a parameter placed as {parameter.placements} can't be built on meta",
            fix="build the model in memory",
        )
    return tuple(
        slice(begin, begin + count) for begin, count in zip(offsets, shape, strict=True)
    )


def shard_group(record: Any) -> dist.ProcessGroup:
    """The ranks that hold the parts of one copy of a parameter (on a 2-D mesh not all)."""
    group: dist.ProcessGroup = record.mesh_info.shard_process_group
    return group


def compute_dtype(record: Any) -> torch.dtype:
    """The dtype that the all-gather is to have: the policy's for floating parameters."""
    own: torch.dtype = record.sharded_param.dtype
    wanted: torch.dtype | None = record.mp_policy.param_dtype
    return own if wanted is None or not own.is_floating_point else wanted


def gathered_after_backward(model: nn.Module) -> list[str]:
    """Names of groups that backward should have given back and did not. (The root may be gathered:
    by an evaluation since.)"""
    names = {id(module): name for name, module in model.named_modules()}
    return [
        names[id(module)]
        for module in fsdp_modules(model)
        if module is not model
        for group in _groups_of(module)
        if group.is_unsharded and group._reshard_after_forward
    ]


def in_backward() -> bool:
    """True inside an autograd pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_was_cut_short(model: nn.Module) -> bool:
    """True if an error ended the last backward: FSDP2 is still in the middle of it."""
    return not in_backward() and any(
        group._training_state.name in ("PRE_BACKWARD", "POST_BACKWARD") for group in _groups(model)
    )


def abandon_backward(model: nn.Module) -> None:
    """Bring FSDP2 back from the middle of a backward that an error ended. Raises SwapUsageError
    where torch has no call for that (before 2.13)."""
    reset: Callable[[], None] | None = getattr(model, "reset_iter_state", None)
    if reset is None:
        raise SwapUsageError(
            f"torch {torch.__version__} can't go on after an error inside backward",
            fix="start again from a checkpoint, or use torch 2.13 or newer",
        )
    reset()
    for record in fsdp_params(model):  # what it leaves behind
        record.unsharded_accumulated_grad = None
        if hasattr(record, "_unsharded_param"):
            record._unsharded_param.grad = None
        record.sharded_param.grad = None


def abandon_forward(model: nn.Module) -> None:
    """If an error ended the forward just left, bring FSDP2 back: else the next one would skip the
    root's part, and compute with parameters that are still gathered. Gradients of earlier passes
    stay. (Before torch 2.13 there is no call for it; there the next forward was seen to be right
    unless parameters are updated in between.)"""
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    if in_backward() or state._training_state.name != "FORWARD":
        return
    reset: Callable[[], None] | None = getattr(model, "reset_iter_state", None)
    if reset is not None:
        partial_sums = [(group, group._partial_reduce_output) for group in _groups(model)]
        reset()
        for group, partial_sum in partial_sums:
            group._partial_reduce_output = partial_sum


def gather_once_outside_inference_mode(model: nn.Module) -> None:
    """Make the buffers of groups that were never gathered, one group at a time: made in inference
    mode they would be of no use for training later. Collective."""
    new = [
        module
        for module in fsdp_modules(model)
        if not all(
            hasattr(record, "_unsharded_param")
            for group in _groups_of(module)
            for record in group.fsdp_params
        )
    ]
    with torch.inference_mode(False), torch.no_grad():
        for module in new:
            module.unshard()
            module.reshard()


def ways_to_see(record: Any) -> list[nn.Parameter]:
    """The parameters that its module may show: the sharded one, or while it is gathered another."""
    seen = [record.sharded_param]
    if hasattr(record, "_unsharded_param"):
        seen.append(record._unsharded_param)
    return seen


def is_in_its_place(record: Any, parameter: nn.Parameter) -> bool:
    """False if somebody gave the module another parameter instead (load_state_dict(assign=True),
    setattr)."""
    info = record._module_info
    mine = ways_to_see(record)
    modules = (info.module, *info.shared_modules)
    names = (info.param_name, *info.shared_param_names)
    return record.sharded_param is parameter and all(
        any(module._parameters.get(name) is each for each in mine)
        for module, name in zip(modules, names, strict=True)
    )


def reshard_all(model: nn.Module) -> None:
    """Free every gathered parameter: the next forward gathers the new values. (FSDP2 keeps the
    root's after a forward without backward, and would compute with the old ones.)"""
    for module in fsdp_modules(model):
        module.reshard()
