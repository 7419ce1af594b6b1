"""A swapper driven as DeepSpeed drives it, without DeepSpeed: its parameters, config and calls."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nvmeswap.deepspeed.param_swapper import ParameterSwapper

MIB = 1 << 20
AIO = {"block_size": MIB, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
       "overlap_events": True, "use_gds": False}


class Status(enum.Enum):
    """With the names of DeepSpeed's PartitionedParamStatus."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Parameter:
    """What DeepSpeed hangs on a parameter, with a partition of random bits."""

    def __init__(self, ds_id: int, numel: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(ds_id)
        self.ds_id = ds_id
        self.expected = torch.randn(numel, generator=generator).to(dtype)
        self.data = torch.empty(0, dtype=dtype)
        self.ds_tensor: Any = torch.empty(0, dtype=dtype)
        self.ds_tensor.ds_numel = numel
        self.ds_tensor.status = Status.AVAILABLE

    @property
    def is_right(self) -> bool:
        """Is what DeepSpeed would gather now what was last written?"""
        partition = self.ds_tensor.data
        return (self.ds_tensor.status is Status.AVAILABLE and partition.dtype is self.expected.dtype
                and torch.equal(partition, self.expected))


class DrivenSwapper:
    """A `ParameterSwapper` in `swapper`, and the calls DeepSpeed makes, one phase each."""

    def __init__(self, folder: Path, *, buffer_count: int = 5, buffer_size: int = MIB,
                 dtype: torch.dtype = torch.float32, **aio: Any) -> None:
        offload_param = SimpleNamespace(nvme_path=str(folder), buffer_count=buffer_count,
                                        buffer_size=buffer_size, max_in_cpu=0, pin_memory=True)
        config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=offload_param),
                                 aio_config=AIO | aio)
        self.dtype = dtype
        self.buffer_count = buffer_count
        self.swapper = ParameterSwapper(config, dtype, status=Status)

    def partition(self, ds_id: int, numel: int) -> Parameter:
        """As zero.Init does, for one parameter."""
        parameter = Parameter(ds_id, numel, self.dtype)
        memory = self.swapper.get_buffer(parameter, numel)
        memory.copy_(parameter.expected)
        parameter.ds_tensor.data = memory
        self.swapper.swap_out_and_release([parameter])
        return parameter

    def gather(self, parameters: Sequence[Parameter]) -> None:
        """As before a module's forward."""
        self.swapper.make_available(parameters)

    def release(self, parameters: Sequence[Parameter]) -> None:
        """As after it."""
        self.swapper.remove_partition_and_release_buffers(parameters)

    def update(self, parameters: Sequence[Parameter]) -> None:
        """As a step does: new values."""
        for parameter in parameters:
            parameter.expected = (parameter.expected.float() + 1).to(self.dtype)
        self.write_back(parameters)

    def write_back(self, parameters: Sequence[Parameter]) -> None:
        """The end of `update`; after an error it can be repeated."""
        self.swapper.swap_out_partitioned_params(
            parameters, [parameter.expected.float() for parameter in parameters])

    def forget_copies(self) -> None:
        """So that later reads go to the drive."""
        self.swapper.trim()
