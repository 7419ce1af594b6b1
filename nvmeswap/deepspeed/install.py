"""`install`: DeepSpeed's own scripts and JSON, with our swappers and our engine below them.

What is replaced, all of it or nothing (names of DeepSpeed 0.19.8):

- `zero.partition_parameters.AsyncPartitionedParameterSwapper`, where `zero.Init` makes one;
- `zero.stage3.PartitionedOptimizerSwapper` and `PipelinedOptimizerSwapper`;
- `Init._ensure_availability_of_partitioned_params`: it asks for some parameters and waits for all
  reads; ours waits for those asked for;
- `DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out`: it updates a partition that was read
  ahead in memory alone, and that update is lost when the memory is given back;
- `DeepSpeedZeroOptimizer_Stage3.destroy`: it gives memory back, and the optimizer's files;
- `DeepSpeedZeroOptimizer_Stage3.zero_grad`: gradients of a step that was skipped go as well;
- `DeepSpeedEngine._get_param_fragment_func` and `load_module_state_dict`: frozen parameters in
  checkpoints (frozen.py);
- the I/O engine, under all of them and FastPersist (inject.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nvmeswap.deepspeed.frozen import is_on_nvme, loaded_fragments, saved_fragment
from nvmeswap.deepspeed.inject import inject_engine, withdraw_engine
from nvmeswap.deepspeed.optimizer_swapper import OptimizerSwapper
from nvmeswap.deepspeed.param_swapper import ParameterSwapper
from nvmeswap.errors import SwapConfigError

TESTED_VERSION = "0.19.8"
_ZERO = "deepspeed.runtime.zero"
_PARTITIONING = f"{_ZERO}.partition_parameters"
_STAGE3 = f"{_ZERO}.stage3"
_ENGINE = "deepspeed.runtime.engine"
_INHERITED = object()


class _Needed(NamedTuple):
    """A place in DeepSpeed that is replaced or used, and the parameters that it must have."""

    module: str
    path: str
    parameters: tuple[str, ...] | None = None


_SURFACE = (
    _Needed(_PARTITIONING, "AsyncPartitionedParameterSwapper.__init__",
            ("self", "ds_config", "model_dtype")),
    _Needed(_PARTITIONING, "AsyncPartitionedParameterSwapper.swap_in",
            ("self", "params", "async_op", "swap_in_buffers")),
    _Needed(_PARTITIONING, "AsyncPartitionedParameterSwapper.swap_out_and_release",
            ("self", "params", "async_op", "force_buffer_release")),
    _Needed(_PARTITIONING, "AsyncPartitionedParameterSwapper.swap_out_partitioned_params",
            ("self", "dst_fp16_params", "src_fp32_params")),
    _Needed(_PARTITIONING, "AsyncPartitionedParameterSwapper.get_buffer",
            ("self", "param", "numel")),
    _Needed(_PARTITIONING, "PartitionedParamStatus.AVAILABLE"),
    _Needed(_PARTITIONING, "PartitionedParamStatus.NOT_AVAILABLE"),
    _Needed(_PARTITIONING, "PartitionedParamStatus.INFLIGHT"),
    _Needed(_PARTITIONING, "Init._ensure_availability_of_partitioned_params", ("self", "params")),
    _Needed(_STAGE3, "DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out", ("self", "i")),
    _Needed(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.destroy", ("self",)),
    _Needed(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.zero_grad"),
    _Needed(_ENGINE, "DeepSpeedEngine._get_param_fragment_func", ("self", "param")),
    _Needed(_ENGINE, "DeepSpeedEngine.load_module_state_dict"),
    _Needed(_ENGINE, "FROZEN_PARAM_FRAGMENTS"),
    *(
        _Needed(_STAGE3, f"{swapper}.{method}", parameters)
        for swapper in ("PartitionedOptimizerSwapper", "PipelinedOptimizerSwapper")
        for method, parameters in (
            ("__init__", ("self", "swap_config", "aio_config", "base_folder", "optimizer",
                          "largest_numel", "device", "dtype", "timers")),
            ("swap_in_optimizer_state", ("self", "parameter", "async_parameter")),
            ("swap_out_optimizer_state", ("self", "parameter", "async_swap")),
            ("swap_out_gradients", ("self", "parameter", "gradient_offsets", "gradient_tensors")),
            ("release_swap_buffers", ("self", "parameter")),
            ("writeback_optimizer_state_and_gradients",
             ("self", "parameter", "write_opt_state", "write_gradients")),
            ("initialize_parameters", ("self", "parameters", "src_tensors")),
            ("purge_state", ("self",)),
        )
    ),
)

_replaced: list[tuple[Any, str, Any]] = []  # where, name, what was there


def install() -> None:
    """Put our swappers and engine below DeepSpeed, in this process; before `deepspeed.zero.Init`
    and `deepspeed.initialize`. What was built earlier keeps DeepSpeed's. May be repeated.

    Raises SwapConfigError, naming what is missing, for a DeepSpeed whose inside differs from
    0.19.8's where it matters; then nothing is changed. Blocks for importing DeepSpeed. Not
    thread-safe.
    """
    if _replaced:
        return
    modules = _check_surface()
    inject_engine()
    partitioning, stage3 = modules[_PARTITIONING], modules[_STAGE3]
    status = partitioning.PartitionedParamStatus
    _replace(partitioning, "AsyncPartitionedParameterSwapper",
             functools.partial(ParameterSwapper, status=status))
    _replace(stage3, "PartitionedOptimizerSwapper", OptimizerSwapper)
    _replace(stage3, "PipelinedOptimizerSwapper", OptimizerSwapper)
    init, zero = partitioning.Init, stage3.DeepSpeedZeroOptimizer_Stage3
    _replace(init, "_ensure_availability_of_partitioned_params",
             _make_available(init._ensure_availability_of_partitioned_params))
    _replace(zero, "_partitioned_params_swap_out",
             _swap_out_partitions(zero._partitioned_params_swap_out))
    _replace(zero, "destroy", _destroy(zero.destroy))
    _replace(zero, "zero_grad", _zero_grad(zero.zero_grad))
    engine, key = modules[_ENGINE].DeepSpeedEngine, modules[_ENGINE].FROZEN_PARAM_FRAGMENTS
    _replace(engine, "_get_param_fragment_func", saved_fragment(engine._get_param_fragment_func))
    _replace(engine, "load_module_state_dict",
             loaded_fragments(engine.load_module_state_dict, key))


def uninstall() -> None:
    """Put back what `install` replaced. What was built meanwhile keeps ours. May be repeated."""
    while _replaced:
        owner, name, former = _replaced.pop()
        if former is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
    withdraw_engine()


def is_installed() -> bool:
    """Whether DeepSpeed would build on ours now."""
    return bool(_replaced)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
    setattr(owner, name, ours)


def _check_surface() -> dict[str, Any]:
    """The modules. Raises SwapConfigError."""
    modules: dict[str, Any] = {}
    missing: list[str] = []
    for needed in _SURFACE:
        try:
            module = modules[needed.module] = importlib.import_module(needed.module)
        except ImportError as error:
            raise SwapConfigError(
                "DeepSpeed can't be imported", cause=str(error),
                fix=f"pip install deepspeed=={TESTED_VERSION}",
            ) from error
        found: Any = module
        for name in needed.path.split("."):
            found = getattr(found, name, None)
        if found is None:
            missing.append(f"{needed.module}.{needed.path}")
        elif needed.parameters is not None:
            got = tuple(inspect.signature(found).parameters)
            if got != needed.parameters:
                missing.append(f"{needed.module}.{needed.path}({', '.join(needed.parameters)}), "
                               f"which has ({', '.join(got)})")
    partitioning, stage3 = modules[_PARTITIONING], modules[_STAGE3]
    for theirs, ours in (
        (getattr(partitioning, "AsyncPartitionedParameterSwapper", None), ParameterSwapper),
        (getattr(stage3, "PartitionedOptimizerSwapper", None), OptimizerSwapper),
        (getattr(stage3, "PipelinedOptimizerSwapper", None), OptimizerSwapper),
    ):
        unknown = {name for name in dir(theirs) if not name.startswith("_")} - set(dir(ours))
        missing += [f"{theirs}.{name}, which ours lacks" for name in sorted(unknown)]
    if missing:
        version = getattr(importlib.import_module("deepspeed"), "__version__", "of unknown version")
        raise SwapConfigError(
            f"DeepSpeed {version} lacks what our swappers stand on, so nothing was replaced",
            cause="; ".join(missing), fix=f"use DeepSpeed {TESTED_VERSION}",
        )
    return modules


def _make_available(former: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """For `Init`: `former` where the parameters are not ours."""

    def ensure_availability(self: Any, params: Any) -> None:
        params = list(params)
        for swapper, its_params in _by_swapper(params).items():
            swapper.make_available([param for param in its_params if swapper.is_out(param)])
        others = [param for param in params if not _is_ours(param)]
        if others:
            former(self, others)

    return ensure_availability


def _swap_out_partitions(former: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """For the ZeRO-3 optimizer: every partition that lives on NVMe is written, wherever it is just
    now."""

    def swap_out(self: Any, i: int) -> None:
        params = self.fp16_groups[i]
        if not _is_ours(params[0]):
            former(self, i)
            return
        master = self.fp32_partitioned_groups_flat[i].data
        pieces = master.split([param.ds_tensor.ds_numel for param in params])
        sources = {id(param): piece for param, piece in zip(params, pieces, strict=True)}
        on_drive = [param for param in params if is_on_nvme(param)]
        for param in params:
            if not is_on_nvme(param):
                param.ds_tensor.data.copy_(sources[id(param)])
        for swapper, its_params in _by_swapper(on_drive).items():
            swapper.swap_out_partitioned_params(
                its_params, [sources[id(param)] for param in its_params]
            )

    return swap_out


def _destroy(former: Callable[[Any], None]) -> Callable[[Any], None]:
    """For the ZeRO-3 optimizer: DeepSpeed keeps the model of a destroyed engine, and all that hangs
    on it, in tables of its own. The parameters stay readable."""

    def destroy(self: Any) -> None:
        swappers = _by_swapper([param for group in self.fp16_groups for param in group])
        former(self)
        if isinstance(self.optimizer_swapper, OptimizerSwapper):
            self.optimizer_swapper.close()
        for swapper in swappers:
            swapper.trim()

    return destroy


def _zero_grad(former: Callable[..., None]) -> Callable[..., None]:
    """For the ZeRO-3 optimizer: DeepSpeed calls it after each step, also one that is skipped."""

    def zero_grad(self: Any, *args: Any, **keywords: Any) -> None:
        former(self, *args, **keywords)
        if isinstance(self.optimizer_swapper, OptimizerSwapper):
            self.optimizer_swapper.drop_gradients()

    return zero_grad


def _is_ours(param: Any) -> bool:
    return isinstance(getattr(param, "nvme_swapper", None), ParameterSwapper)


def _by_swapper(params: Sequence[Any]) -> dict[ParameterSwapper, list[Any]]:
    """Those of ours, grouped: models made under several `zero.Init` have several."""
    groups: dict[ParameterSwapper, list[Any]] = {}
    for param in filter(_is_ours, params):
        groups.setdefault(param.nvme_swapper, []).append(param)
    return groups
