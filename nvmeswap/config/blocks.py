"""The blocks of the configuration: one class a JSON object, one field a key.

The fields' descriptions are the settings page of the documentation.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from nvmeswap.config import keys
from nvmeswap.config.block import Block
from nvmeswap.config.quantities import ByteCount, ElementCount

# 4 Mi elements: 48 MiB a read, far above what a drive needs for full speed, and 150 MiB for three.
DEFAULT_SUB_GROUP_NUMEL = 4 << 20


class OffloadDevice(enum.Enum):
    """A tier: `NONE` leaves the bytes on the training device, `CPU` in host memory."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, (str, Path)) else given


NvmePath = Annotated[tuple[Path, ...] | None, BeforeValidator(_listed)]
"""One path or a list of them, as a tuple."""


class OffloadParamConfig(Block):
    """`zero_optimization.offload_param`: where parameter shards live between uses."""

    device: OffloadDevice = Field(
        default=OffloadDevice.NONE,
        description=(
            "Where parameter shards live between uses: none (on the training device), cpu "
            "(host memory) or nvme."
        ),
    )
    nvme_path: NvmePath = Field(
        default=None,
        description=(
            "An existing folder on the drive, or one on each of several drives, which share the "
            "bytes by their speed; needed for nvme, and the same for both blocks."
        ),
    )
    buffer_count: int = Field(
        default=5,
        ge=1,
        description=(
            "Slots per size class. More lets reads run further ahead; fewer saves memory; 1 works."
        ),
    )
    buffer_size: int = Field(
        default=100_000_000,
        ge=1,
        description=(
            "Elements. A larger shard takes no slot and is read straight to its "
            "destination, without read-ahead. Lower it if one huge shard dominates memory."
        ),
    )
    max_in_cpu: ElementCount = Field(
        default=1_000_000_000,
        description=(
            "Elements of a rank kept in host memory between uses, in extra slots; text with a unit "
            "is bytes. 0 takes the least memory."
        ),
    )
    pin_memory: bool = Field(
        default=True,
        description=(
            "Page-lock the swap memory; off unless both blocks say true. Turn it off where "
            "`ulimit -l` is small."
        ),
    )


class OffloadOptimizerConfig(Block):
    """`zero_optimization.offload_optimizer`: where fp32 masters and moments live between steps."""

    refused: ClassVar[Mapping[str, str]] = keys.OFFLOAD_OPTIMIZER_REFUSED
    ignored: ClassVar[Mapping[str, str]] = keys.OFFLOAD_OPTIMIZER_IGNORED
    device: OffloadDevice = Field(
        default=OffloadDevice.NONE,
        description=(
            "Where fp32 masters and moments live between steps: none (on the training "
            "device), cpu (host memory) or nvme."
        ),
    )
    nvme_path: NvmePath = Field(
        default=None,
        description=(
            "An existing folder on the drive, or one on each of several drives, which share the "
            "bytes by their speed; needed for nvme, and the same for both blocks."
        ),
    )
    buffer_count: int = Field(
        default=4,
        ge=1,
        description=(
            "Sub-groups in host memory. 3 overlap reading, updating and writing; 1 works, "
            "without overlap."
        ),
    )
    pin_memory: bool = Field(
        default=True,
        description=(
            "Page-lock the swap memory; off unless both blocks say true. Turn it off where "
            "`ulimit -l` is small."
        ),
    )
    ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description=(
            "Part of the sub-groups that is swapped; the others stay in host memory, and the "
            "weights are the same."
        ),
    )
    cpuadam_cores_perc: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=(
            "Share of the cores that the update uses. Left out: one core, because pieces that fit "
            "a cache gain nothing from more."
        ),
    )


class ZeroConfig(Block):
    """`zero_optimization`."""

    ignored: ClassVar[Mapping[str, str]] = keys.ZERO_IGNORED
    refused: ClassVar[Mapping[str, str]] = keys.ZERO_REFUSED
    stage: int = Field(
        description=(
            "3: parameters, gradients and optimizer state are sharded. 1 and 2, which are the "
            "same here: gathered parameters stay on the device from forward to the end of "
            "backward, and only optimizer state is offloaded."
        )
    )
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    sub_group_size: int = Field(
        default=DEFAULT_SUB_GROUP_NUMEL,
        ge=1,
        description=(
            "Most elements whose optimizer state is read, updated and written together; a buffer "
            "takes 12 to 14 bytes an element. DeepSpeed's default, 1e9, would be 12 GB a buffer."
        ),
    )


class AioConfig(Block):
    """`aio`: how the engine moves bytes."""

    ignored: ClassVar[Mapping[str, str]] = keys.AIO_IGNORED
    block_size: int = Field(
        default=1 << 20,
        ge=4096,
        le=1 << 30,
        multiple_of=4096,
        description=(
            "Bytes of one kernel transfer. Smaller lets an urgent read in sooner; larger "
            "costs less CPU."
        ),
    )
    queue_depth: int = Field(
        default=32,
        ge=1,
        le=4096,
        description=(
            "Blocks in the kernel at a time, over all drives. Raise it for RAID, for more than "
            "eight drives, or if the drive is not busy."
        ),
    )
    intra_op_parallelism: int = Field(
        default=2,
        ge=1,
        le=64,
        description=(
            "Threads of the posix backend, at most one a core; the others use one whatever this "
            "says, and use_gds at least 8."
        ),
    )
    use_gds: bool = Field(
        default=False,
        description=(
            "Let TensorSwapper move tensors on a GPU by cuFile (GPUDirect Storage), and others by "
            "threads. Where cuFile does not work a warning says why, and nothing is different; "
            "elsewhere it has no effect, and a warning says so."
        ),
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


class OptimizerBlock(Block):
    """`optimizer`: class name and its options, as in torch.optim."""

    type: str = Field(
        default="AdamW", description="AdamW, or Adam, which decays decoupled too, by 0 unless set."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="lr, betas, eps, weight_decay, maximize."
    )


class SwapBlock(Block):
    """`nvmeswap`: what DeepSpeed has no key for."""

    backend: str = Field(
        default="auto",
        pattern="^(auto|uring|aio|posix)$",
        description=(
            "How bytes reach the drive. auto tries io_uring, Linux AIO and threads, in this order, "
            "by a real transfer in the folder."
        ),
    )
    direct: str = Field(
        default="prefer",
        pattern="^(prefer|require|off)$",
        description=(
            "Bypass the page cache: prefer falls back to buffered I/O with a warning, "
            "require raises, off never does."
        ),
    )
    checksum: str = Field(
        default="all",
        pattern="^(all|off)$",
        description="Compare each read with the xxh3 sum of what was written, or do not (off).",
    )
    ephemeral: bool = Field(
        default=False,
        description=(
            "Swap files lose their names once they are open: no other process finds them, and "
            "their space comes back however the process ends. Then `ls` and `du` don't show it."
        ),
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest wait for one transfer or slot. Raise it for slow or shared drives.",
    )
    host_memory_nbytes: ByteCount | None = Field(
        default=None,
        ge=1,
        description=(
            "Limit of a rank's swap memory. Over it slots are taken away, down to one a "
            "class. Left out: what the counts ask for."
        ),
    )
    min_swap_nbytes: ByteCount = Field(
        default=32 << 10,
        ge=0,
        description=(
            "Parameter shards smaller than this are not swapped: they stay on the GPU that "
            "computes, else in host memory. Fetching many takes longer than computing with them."
        ),
    )
    keep_resident_bytes: ByteCount = Field(
        default=0,
        ge=0,
        description=(
            "Device memory for more shards that are not swapped: those that fit, in the order of "
            "the parameters. Used before host memory, as that is before the drive."
        ),
    )
    overlap_step: bool = Field(
        default=False,
        description=(
            "Update a parameter during backward, as soon as its gradient is final, and not in "
            "step()."
        ),
    )
    update_device: str = Field(
        default="cpu",
        pattern="^(cpu|cuda)$",
        description=(
            "Where updates are computed. cuda: states pass through a copy of one sub-group on the "
            "GPU, and parameters that stay there are updated in place. It takes 12 to 24 bytes of "
            "device memory an element of sub_group_size, which `nvmeswap plan` does not count."
        ),
    )
