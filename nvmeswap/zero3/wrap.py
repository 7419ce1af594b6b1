"""`shard()`: ZeRO-3 with parameters and optimizer state on NVMe, for a plain PyTorch loop."""

from __future__ import annotations

import inspect
import os
import zlib
from collections.abc import Callable, Mapping
from functools import partial
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
from nvmeswap.errors import SwapConfigError, SwapError, SwapUsageError
from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.space import new_run_name
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.build import swap_shards
from nvmeswap.zero3.guard import is_trained_here
from nvmeswap.zero3.materialise import FirstValues, materialise, refuse_different_seeds
from nvmeswap.zero3.optimizer import ShardedOptimizer
from nvmeswap.zero3.tensor import SwappedTensor

Model = TypeVar("Model", bound=nn.Module)
_T = TypeVar("_T")

_HOW_IT_RUNS = frozenset({"fused", "foreach", "torch_adam"})


def shard(
    model: Model,
    config: Mapping[str, Any] | str | Path,
    mesh: DeviceMesh | None = None,
    optimizer: type[Optimizer] | tuple[type[Optimizer], Mapping[str, Any]] | None = None,
    *,
    weights: str | Path | None = None,
    initialise: Callable[[nn.Module], Any] | None = None,
) -> tuple[Model, Optimizer]:
    """Shard a model over all ranks (FSDP2) and swap its shards as a DeepSpeed JSON says.

        model, optimizer = nvmeswap.zero3.shard(model, "ds_config.json")
        loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        model: built in memory, on the CPU or a GPU, or on the meta device (then nothing of it is
            in memory yet); changed in place. If `fully_shard` was applied to it already, its
            grouping and precision stay; else every element of its outermost ModuleLists becomes a
            group.
        config: dict or path; `nvmeswap.config` lists what is served.
        mesh: the device mesh of FSDP2; None: all ranks. World size 1 needs no launcher.
        optimizer: class, or (class, options), instead of the configuration's `optimizer` block.
        weights: a .safetensors file, or a folder of them (with an index or without), that has all
            parameters and persistent buffers by their names in `state_dict()`. Each rank reads its
            part, one module at a time. Values are converted to the model's dtypes.
        initialise: called for each module whose own parameters or buffers (not those of its
            children) are on meta and not in `weights`, in the order of `model.modules()`; it must
            set all of them. Default: `_init_weights` of a transformers model, or the module's
            `reset_parameters`.

    A module on meta is initialised in host memory with the CPU's random numbers, as a whole on
    every rank. So with one seed on all ranks (`torch.manual_seed`) weights are the same at every
    world size, and those of a model built in memory from modules that initialise themselves. At
    most one module is in memory at a time, besides the swap space's own.
    Returns the same model, and an optimizer whose `swap` has `stats()` and `close()`; with both
    offload devices "none", plain FSDP2 and torch.optim.AdamW(fused=True).
    Raises: SwapConfigError, SwapPathError, SwapBudgetError and SwapSpaceError before training;
    SwapUsageError for a module that can't be initialised, SwapManifestError for weights that do
    not fit: `field` is the parameter, `path` the file.
    Blocking: writes all shards and the first optimizer state.
    Gradients go to host memory as they come, where `parameter.grad` shows them; `zero_grad` of
    either model or optimizer forgets them. `gradient_clipping`, `optimizer.clip_grad_norm_` and
    `zero3.GradScaler` are faster than torch's own.
    """
    kind = _device_kind(model, mesh)
    _ensure_process_group(kind)
    agreement = Agreement(None, _device_now(kind))
    settings, cls, options = _on_all_ranks(agreement, partial(_read, config, optimizer))
    _refuse_different_settings(agreement, settings, cls, options)
    mesh = mesh or init_device_mesh(kind, (dist.get_world_size(),))
    policy = precision_of(settings)
    values = FirstValues(weights, initialise)
    # A caller may still be in the block in which the model was built on meta.
    with torch.device("cpu"):
        if weights is None and any(parameter.is_meta for parameter in model.parameters()):
            refuse_different_seeds(agreement)
        zero = settings.zero_optimization
        fsdp.shard_by_blocks(model, mesh, policy, keeps_gathered=zero.stage < 3)
        _refuse_other_precision(model, policy)
        if zero.offload_optimizer.device is OffloadDevice.NONE:
            _on_all_ranks(agreement, partial(materialise, model, values))
            return model, cls(model.parameters(), **_fused(cls), **options)
        return model, _swapped(model, settings, agreement, cls, options, values)


def _read(
    config: Mapping[str, Any] | str | Path,
    optimizer: type[Optimizer] | tuple[type[Optimizer], Mapping[str, Any]] | None,
) -> tuple[Config, type[Optimizer], dict[str, Any]]:
    settings = Config.load(config)
    return settings, *optimizer_of(settings.optimizer, optimizer)


def _refuse_different_settings(
    agreement: Agreement, settings: Config, cls: type[Optimizer], options: Mapping[str, Any]
) -> None:
    """Ranks that train differently would diverge, or wait for each other in vain. (Paths and
    budgets may differ: nodes do.)"""
    if agreement.alone:
        return
    said = settings.model_dump(mode="json")
    for block in ("offload_param", "offload_optimizer"):
        said["zero_optimization"][block].pop("nvme_path")
    for name in ("host_memory_nbytes", "backend", "direct", "timeout_s"):
        said["nvmeswap"].pop(name)
    text = f"{said} {cls.__qualname__} {sorted(options.items())}"
    if not agreement.is_same_on_all(zlib.crc32(text.encode()), dist.group.WORLD):
        raise SwapUsageError(
            "the configuration or the optimizer differs between ranks",
            fix="give all ranks the same; only paths and host_memory_nbytes may differ",
        )


def _device_kind(model: nn.Module, mesh: DeviceMesh | None) -> str:
    """"cpu" or "cuda": the mesh's, or where the model is, or where it could be; raises
    SwapUsageError for one that can't be sharded."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise SwapUsageError(
            "the model has no parameter to train",
            fix="set requires_grad_(True) on what is to be trained",
        )
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if any(isinstance(fsdp.local_tensor(p), SwappedTensor) or is_trained_here(p) for p in sharded):
        raise SwapUsageError("the model is swapped already", fix="call shard() once a model")
    meshes = [mesh] if mesh is not None else [p.device_mesh for p in sharded]
    kinds = [mesh.device_type for mesh in meshes]
    kinds += [p.device.type for p in parameters if p.device.type != "meta"]
    kinds += ["cuda" if torch.cuda.is_available() else "cpu"]
    return kinds[0]


def _device_now(kind: str) -> torch.device:
    """This rank's; FSDP2 takes the same."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else (
        torch.device(kind)
    )


def _swapped(
    model: nn.Module,
    settings: Config,
    agreement: Agreement,
    cls: type[Optimizer],
    options: Mapping[str, Any],
    values: FirstValues,
) -> ShardedOptimizer:
    run = _run_name()
    optimizers: list[ShardedOptimizer] = []

    def swap() -> None:
        optimizers.append(
            swap_shards(
                model, settings, run=run, agreement=agreement, cls=cls, options=options,
                values=values,
            )
        )

    try:
        _on_all_ranks(agreement, swap)
    except SwapError:
        for optimizer in optimizers:
            optimizer.close()
        raise
    (optimizer,) = optimizers
    if settings.nvmeswap.overlap_step:
        optimizer.overlap_backward(OverlapSettings(settings.gradient_accumulation_steps))
    return optimizer


def _on_all_ranks(agreement: Agreement, set_up: Callable[[], _T]) -> _T:
    """Set up on all ranks, or on none: what fails on one is raised on all."""
    result: list[_T] = []
    failure: Exception | None = None
    try:
        result.append(set_up())
    except SwapError as error:
        agreement.report(error)
    except Exception as error:  # others would wait all the same
        failure = error
        agreement.report(SwapUsageError(f"set-up failed: {error!r}", fix="see the cause"))
    try:
        agreement.raise_if_any_rank_failed(fix="mend that rank's error and start again")
    except SwapError:
        if failure is not None:
            raise failure from None
        raise
    return result[0]


def precision_of(settings: Config) -> MixedPrecisionPolicy:
    """FSDP2's policy for the JSON's `bf16` and `fp16`."""
    if settings.bf16.enabled:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if settings.fp16.enabled:
        return MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _refuse_other_precision(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """A model that was sharded before keeps its own policy: the JSON must not contradict it."""
    for record in fsdp.fsdp_params(model):
        if policy.param_dtype not in (None, record.mp_policy.param_dtype):
            raise SwapUsageError(
                f"the model is sharded already, and not for {policy.param_dtype}",
                fix="build it anew, or give its fully_shard calls the MixedPrecisionPolicy",
            )


def optimizer_of(
    block: OptimizerBlock | None,
    given: type[Optimizer] | tuple[type[Optimizer], Mapping[str, Any]] | None,
) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class and its options, from the argument or the JSON."""
    if given is not None:
        cls, given_options = given if isinstance(given, tuple) else (given, {})
        options = dict(given_options)
        if issubclass(cls, SwappedAdamW):
            cls = torch.optim.AdamW
    else:
        block = block or OptimizerBlock()
        options = dict(block.params)
        cls = _class_named(block.type, options)
    options = {name: value for name, value in options.items() if value not in ("auto", None)}
    for name in _HOW_IT_RUNS:
        options.pop(name, None)
    if block is not None and given is None and block.type.lower() == "adam":
        options.setdefault("weight_decay", 0.0)  # DeepSpeed's Adam has none by default
    known = inspect.signature(cls).parameters
    for name in options:
        if name not in known:
            raise SwapConfigError(
                f"{cls.__name__} has no option {name}",
                key=f"optimizer.params.{name}",
                fix="it has " + ", ".join(sorted(known.keys() - {"params"})),
            )
    try:
        cls([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        raise SwapConfigError(
            f"{cls.__name__} can't be built with {options}",
            key="optimizer.params", cause=str(error), fix="give values as the class takes them",
        ) from error
    return cls, options


def _fused(cls: type[Optimizer]) -> dict[str, Any]:
    return {"fused": True} if "fused" in inspect.signature(cls).parameters else {}


def _class_named(name: str, options: dict[str, Any]) -> type[Optimizer]:
    """DeepSpeed's names: its Adam decays as AdamW does, unless told otherwise."""
    if name.lower() == "adam":
        return torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        if cls.__name__.lower() == name.lower():
            return cls
    raise SwapConfigError(
        f"optimizer {name} is not known",
        key="optimizer.type",
        fix="use AdamW, Adam, SGD or Adagrad, or give shard() the class",
    )


def _ensure_process_group(kind: str) -> None:
    """torchrun's when it launched us, else a group of one."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
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
