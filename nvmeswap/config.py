"""The configuration: DeepSpeed's JSON, read once at the door and checked there.

`Config.load(dict_or_path)` is the only entry. Everything below it receives plain numbers. Rules, in
the order in which they are applied to each block:

1. `"auto"` and null mean the default (`OffloadParamConfig` and its siblings list them).
2. A key that nobody knows is an error naming the nearest known key; in the outermost block, where
   other tools keep their sections, it is a warning.
3. A key that is known but can't be honoured here is an error naming what to use instead.
4. `device: nvme` needs an `nvme_path` that exists, is a folder and can be written.

All messages start with the key's path in the JSON, such as
`zero_optimization.offload_param.device`.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nvmeswap.errors import SwapConfigError, SwapPathError


class OffloadDevice(enum.Enum):
    """A tier: `NONE` leaves the bytes on the training device, `CPU` in host memory."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class _Block(BaseModel):
    """One JSON object. Subclasses list the keys that are known but have no effect here (`ignored`:
    the work they tune is FSDP2's or the user's loop's) and those that are refused with a reason."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, data: Any) -> Any:
        if isinstance(data, BaseModel):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"must be a JSON object, got {type(data).__name__}")
        return {
            key: value
            for key, value in data.items()
            if not (value is None or value == "auto" or key in cls.ignored or key in cls.refused)
        }


class OffloadParamConfig(_Block):
    """`zero_optimization.offload_param`: where parameter shards live between uses."""

    device: OffloadDevice = Field(default=OffloadDevice.NONE, description="none, cpu or nvme")
    nvme_path: Path | None = Field(
        default=None, description="folder for swap files; needed for nvme"
    )
    buffer_count: int = Field(
        default=5, ge=1, description="slots per size class; more lets prefetch run further ahead"
    )
    buffer_size: int = Field(
        default=100_000_000,
        ge=1,
        description="elements; a shard larger than this is streamed through a slot of this size",
    )
    max_in_cpu: int = Field(
        default=1_000_000_000, ge=0, description="elements kept in host memory between uses"
    )
    pin_memory: bool = Field(default=True, description="page-lock the host memory")


class OffloadOptimizerConfig(_Block):
    """`zero_optimization.offload_optimizer`: where fp32 masters and moments live between steps."""

    refused: ClassVar[Mapping[str, str]] = {
        "super_offload": "SuperOffload is DeepSpeed's; leave the key out",
        "zenflow": "ZenFlow is DeepSpeed's; leave the key out",
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cpuadam_cores_perc", "pipeline_read", "pipeline_write", "fast_init"}
    )
    device: OffloadDevice = Field(default=OffloadDevice.NONE, description="none, cpu or nvme")
    nvme_path: Path | None = Field(
        default=None, description="folder for swap files; needed for nvme"
    )
    buffer_count: int = Field(
        default=4,
        ge=1,
        description="sub-groups in host memory at a time; 3 overlap read, update and write",
    )
    pin_memory: bool = Field(default=True, description="page-lock the host memory")
    ratio: float = Field(
        default=1.0, description="part of the state to offload; only 1.0 is served"
    )


class ZeroConfig(_Block):
    """`zero_optimization`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "elastic_checkpoint",
            "enable_sanity_checks",
            "ignore_unused_parameters",
            "legacy_stage1",
            "load_from_fp32_weights",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "override_module_apply",
            "overlap_comm",
            "pipeline_loading_checkpoint",
            "prefetch_bucket_size",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "stage3_allgather_sequential",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "use_multi_rank_bucket_allreduce",
        ]
    )
    refused: ClassVar[Mapping[str, str]] = {
        "zenflow": "ZenFlow is DeepSpeed's; leave the key out",
        "cpu_offload": 'use "offload_optimizer": {"device": "cpu"}',
        "cpu_offload_param": 'use "offload_param": {"device": "cpu"}',
        "cpu_offload_use_pin_memory": 'use "pin_memory" in "offload_optimizer"',
        "mics_shard_size": "pass a 2-D mesh to shard() instead",
        "mics_hierarchical_params_gather": "pass a 2-D mesh to shard() instead",
        "zero_hpz_partition_size": "pass a 2-D mesh to shard() instead",
        "zero_quantized_weights": "quantised communication is not served",
        "zero_quantized_nontrainable_weights": "quantised communication is not served",
        "zero_quantized_gradients": "quantised communication is not served",
        "zeropp_loco_param": "quantised communication is not served",
    }
    stage: int = Field(description="3: parameters, gradients and optimizer state are sharded")
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    sub_group_size: int = Field(
        default=1_000_000_000,
        ge=1,
        description="most elements whose optimizer state is read, updated and written together",
    )


class AioConfig(_Block):
    """`aio`: how the engine moves bytes."""

    ignored: ClassVar[frozenset[str]] = frozenset({"single_submit", "overlap_events"})
    refused: ClassVar[Mapping[str, str]] = {"use_gds": "GPUDirect Storage is not built yet"}
    block_size: int = Field(
        default=1 << 20,
        ge=4096,
        le=1 << 30,
        multiple_of=4096,
        description="bytes of one kernel transfer",
    )
    queue_depth: int = Field(
        default=32, ge=1, le=4096, description="blocks in the kernel at a time"
    )
    intra_op_parallelism: int = Field(
        default=2, ge=1, le=64, description="threads of the posix backend; others use one"
    )

    @model_validator(mode="before")
    @classmethod
    def _old_spelling(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        renamed = dict(data)
        for old in ("thread_count", "num_threads"):
            if old in renamed:
                warnings.warn(
                    f'aio.{old} is the old spelling of "intra_op_parallelism"', stacklevel=2
                )
                renamed.setdefault("intra_op_parallelism", renamed.pop(old))
                renamed.pop(old, None)
        return renamed


class OptimizerBlock(_Block):
    """`optimizer`: class name and its options, as in torch.optim."""

    type: str = "AdamW"
    params: dict[str, Any] = Field(default_factory=dict)


class PrecisionBlock(_Block):
    """`bf16` and `fp16`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "auto_cast",
            "check_grad_overflow",
            "consecutive_hysteresis",
            "hysteresis",
            "immediate_grad_update",
            "initial_scale_power",
            "loss_scale",
            "loss_scale_window",
            "min_loss_scale",
        ]
    )
    refused: ClassVar[Mapping[str, str]] = {
        "bf16_master_weights_and_grads": "masters are always fp32; leave the key out",
        "bf16_optimizer_states": "optimizer state is always fp32; leave the key out",
        "fp16_master_weights_and_grads": "masters are always fp32; leave the key out",
    }
    enabled: bool = Field(
        default=False, description="compute in this precision; reductions and masters stay fp32"
    )


class SwapBlock(_Block):
    """`nvmeswap`: what DeepSpeed has no key for."""

    backend: str = Field(
        default="auto", pattern="^(auto|aio|posix)$", description="auto tries aio, then posix"
    )
    direct: str = Field(
        default="prefer",
        pattern="^(prefer|require|off)$",
        description="O_DIRECT: prefer falls back to buffered I/O with a warning",
    )
    checksum: str = Field(
        default="all",
        pattern="^(all|off)$",
        description="xxh3 of every byte, checked when it is read",
    )
    timeout_s: float = Field(
        default=60.0, gt=0, description="longest wait for one transfer or slot"
    )
    host_memory_nbytes: int | None = Field(
        default=None,
        ge=1,
        description="budget for all swap memory of a rank; None: what buffers need",
    )
    min_swap_nbytes: int = Field(
        default=32 << 10, ge=0, description="a smaller parameter shard stays in host memory"
    )


class Config(_Block):
    """The whole JSON. `load` is the way in; the other constructors don't check paths."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "memory_breakdown",
            "prescale_gradients",
        ]
    )
    refused: ClassVar[Mapping[str, str]] = {
        "scheduler": "build a torch.optim.lr_scheduler over the optimizer that shard() returns",
        "amp": 'use "bf16": {"enabled": true}',
    }
    zero_optimization: ZeroConfig
    bf16: PrecisionBlock = Field(default_factory=PrecisionBlock)
    fp16: PrecisionBlock = Field(default_factory=PrecisionBlock)
    optimizer: OptimizerBlock | None = None
    aio: AioConfig = Field(default_factory=AioConfig)
    nvmeswap: SwapBlock = Field(default_factory=SwapBlock)
    gradient_clipping: float = 0.0

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path) -> Config:
        """Read and check a configuration given as a dict or as the path of a JSON file.

        Raises SwapConfigError (its `key` is the place in the JSON) and SwapPathError. Reads the
        file and touches `nvme_path`; allocates nothing.
        """
        data = _read(source)
        _check_keys(cls, data, "")
        served = {key: value for key, value in data.items() if key in cls.model_fields}
        try:
            config = cls.model_validate(served)
        except ValidationError as error:
            raise _config_error(error) from None
        config._check_meaning()
        return config

    @property
    def nvme_path(self) -> Path | None:
        """The one folder that all swap files of this run go under, None when nothing is on NVMe."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device is OffloadDevice.NVME:
                return block.nvme_path
        return None

    def _check_meaning(self) -> None:
        zero = self.zero_optimization
        param, optimizer = zero.offload_param, zero.offload_optimizer
        if zero.stage != 3:
            _refuse_stage(zero.stage, param.device)
        if self.fp16.enabled:
            raise SwapConfigError(
                "fp16 with loss scaling is not served",
                key="fp16.enabled",
                fix='use "bf16": {"enabled": true} or fp32',
            )
        if self.gradient_clipping:
            raise SwapConfigError(
                "gradient_clipping is not served yet",
                key="gradient_clipping",
                fix="call optimizer.clip_grad_norm_(max_norm) between backward and step",
            )
        if optimizer.ratio != 1.0:
            raise SwapConfigError(
                "only ratio 1.0 is served",
                key="zero_optimization.offload_optimizer.ratio",
                fix="leave the key out",
            )
        for name, block in (("offload_param", param), ("offload_optimizer", optimizer)):
            if block.device is OffloadDevice.NVME:
                check_folder(block.nvme_path, key=f"zero_optimization.{name}.nvme_path")
        if OffloadDevice.NONE is optimizer.device is not param.device:
            raise SwapConfigError(
                "offloaded parameters need an offloaded optimizer: their fp32 masters live there",
                key="zero_optimization.offload_optimizer.device",
                fix='use {"device": "cpu"} or {"device": "nvme", "nvme_path": ...}',
            )
        if (
            param.device is optimizer.device is OffloadDevice.NVME
            and param.nvme_path != optimizer.nvme_path
        ):
            raise SwapConfigError(
                "offload_param and offload_optimizer name different folders",
                key="zero_optimization.offload_optimizer.nvme_path",
                fix="several drives are not served yet: use one nvme_path for both",
            )


def check_folder(path: Path | None, *, key: str) -> None:
    """Raise SwapPathError unless `path` is an existing folder that this process can write."""
    if path is None or str(path) in ("", "."):
        raise SwapPathError(
            f'{key} is missing: device "nvme" needs a folder',
            key=key,
            fix=f'set "{key}" to a folder on the NVMe drive',
        )
    if not path.exists():
        raise SwapPathError(f"{key} does not exist", key=key, path=path, fix=f"mkdir -p {path}")
    if not path.is_dir():
        raise SwapPathError(
            f"{key} is a file, not a folder",
            key=key,
            path=path,
            fix="name the folder that is to hold the swap files",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        mode = oct(path.stat().st_mode & 0o7777)
        raise SwapPathError(
            f"{key} can't be written by uid {os.getuid()} (mode {mode})",
            key=key,
            path=path,
            fix=f"chown or chmod u+rwx {path}",
        )


def _read(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        data = json.loads(Path(source).read_text())
    except OSError as error:
        raise SwapPathError(
            "the configuration file can't be read",
            key="config",
            path=source,
            errno=error.errno,
            fix="give a dict or the path of a JSON file",
        ) from None
    except ValueError as error:
        raise SwapConfigError(
            "the configuration file is not JSON",
            key="config",
            path=source,
            cause=str(error),
            fix="mend the file",
        ) from None
    if not isinstance(data, Mapping):
        raise SwapConfigError(
            "the configuration must be a JSON object",
            key="config",
            path=source,
            fix='start with {"zero_optimization": {"stage": 3, ...}}',
        )
    return data


def _check_keys(block: type[_Block], data: Mapping[str, Any], prefix: str) -> None:
    """Unknown and refused keys, here and in the blocks inside. Says nothing about values."""
    spelled_otherwise = {"thread_count", "num_threads"} if block is AioConfig else set()
    known = set(block.model_fields) | block.ignored | spelled_otherwise
    for key, value in data.items():
        place = f"{prefix}{key}"
        if key in block.refused:
            if value not in (None, False, "auto", 0):
                raise SwapConfigError(
                    f"{place} is known, but not served here", key=place, fix=block.refused[key]
                )
        elif key not in known:
            _unknown_key(key, place, known, outermost=prefix == "")
        else:
            field = block.model_fields.get(key)
            inner = None if field is None else _block_of(field.annotation)
            if inner is not None and isinstance(value, Mapping):
                _check_keys(inner, value, f"{place}.")


def _block_of(annotation: Any) -> type[_Block] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, _Block)), None)


def _unknown_key(key: str, place: str, known: set[str], *, outermost: bool) -> None:
    near = difflib.get_close_matches(key, sorted(known), n=1)
    fix = f'did you mean "{near[0]}"?' if near else "known here: " + ", ".join(sorted(known))
    if outermost and not near:
        warnings.warn(f"{place} is not a key of nvmeswap and has no effect", stacklevel=4)
        return
    raise SwapConfigError(f"{place} is not a known key", key=place, fix=fix)


def _refuse_stage(stage: int, param_device: OffloadDevice) -> None:
    if param_device is not OffloadDevice.NONE:
        raise SwapConfigError(
            f"offload_param has no effect at stage {stage}: parameters are not sharded there",
            key="zero_optimization.offload_param",
            fix='set "zero_optimization.stage" to 3, or leave offload_param out',
        )
    raise SwapConfigError(
        f"stage {stage} is not served",
        key="zero_optimization.stage",
        fix='set "zero_optimization.stage" to 3',
    )


def _config_error(error: ValidationError) -> SwapConfigError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"])) or "config"
    given = first.get("input")
    shown = "" if isinstance(given, (Mapping, BaseModel)) else f", got {given!r}"
    return SwapConfigError(
        f"{key}: {first['msg']}{shown}", key=key, fix="see docs/settings.md for what the key takes"
    )
