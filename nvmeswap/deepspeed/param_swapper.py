"""`ParameterSwapper`: DeepSpeed's AsyncPartitionedParameterSwapper, on our store.

DeepSpeed's rules are kept (its own status enum, 0-dim data of what is on NVMe). What differs:

- A demand waits for its own reads, and for nothing else.
- `buffer_count * buffer_size` elements are a budget of bytes. Each partition takes its own size of
  it. What was released stays in memory for as long as there is room, and is not read again: in
  backward that is what forward used last, and in the next forward what backward used last.
- Where the budget is used up nothing stops (residence.py).
- Writes go on in the background, and every result is looked at. One that failed is raised by the
  next call, with the partition back in memory.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvmeswap.deepspeed.buffers import HostBuffers
from nvmeswap.deepspeed.partition import Partition
from nvmeswap.deepspeed.residence import Residence
from nvmeswap.deepspeed.space import open_store
from nvmeswap.errors import SwapSpaceError, SwapUsageError, SwapWriteError
from nvmeswap.stats import StoreStats

SWAPPABLE_NBYTES = 1 << 20  # as in DeepSpeed, where it grows with aio.block_size


class ParameterSwapper:
    """Args: `ds_config`, DeepSpeed's; `model_dtype`, of the parameters; `status`, DeepSpeed's enum
    PartitionedParamStatus.

    Raises: SwapPathError, SwapConfigError on construction; SwapSpaceError where a partition gets
    its space, with it still in memory; SwapReadError, SwapChecksumError, SwapTimeoutError by what
    waits for reads; SwapWriteError by any call after the write failed; SwapUsageError for misuse.
    Threads: any, one at a time. Ownership: the store and its folder; parameters are DeepSpeed's.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype, *, status: Any) -> None:
        settings = ds_config.zero_config.offload_param
        self.dtype = model_dtype
        self._status = status
        self._buffer_numel = int(settings.buffer_size)
        engine, self._store = open_store(settings.nvme_path, ds_config.aio_config)
        self._buffers = HostBuffers(
            int(settings.buffer_count) * self._buffer_numel * model_dtype.itemsize,
            engine=engine,
            name="parameters on NVMe",
            setting="offload_param.buffer_count and buffer_size",
        )
        self.swap_folder = str(self._store.folder)
        self._residence = Residence(self._store, self._buffers, status)
        self._lock = threading.RLock()
        self._partitions: dict[int, Partition] = {}  # by ds_id
        self._largest_nbytes = 1
        self._copies: list[Path] = []  # that `get_path` has made
        self._finalizer = weakref.finalize(self, self._store.close)

    # --- what goes to NVMe -----------------------------------------------------------------------

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a partition of this size goes to NVMe: from 1 MiB on."""
        if numel is None:
            if param is None:
                raise SwapUsageError("either param or numel must be given")
            numel = param.ds_tensor.ds_numel
        return numel * self.dtype.itemsize >= SWAPPABLE_NBYTES

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for a new partition, to be filled and handed to `swap_out_and_release`."""
        with self._lock:
            self._residence.raise_failed_writes()
            partition = self._partitions.get(param.ds_id)
            if partition is None:
                partition = Partition(param, self.dtype, numel)
                self._partitions[param.ds_id] = partition
                self._largest_nbytes = max(self._largest_nbytes, partition.nbytes)
            elif partition.numel != numel:
                raise SwapUsageError(
                    f"parameter {param.ds_id} has a partition of {partition.numel:_} elements, "
                    f"not {numel:_}"
                )
            self._residence.hold(partition)
            return partition.view()

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write partitions; their memory is not DeepSpeed's any more. Does not wait for the drive:
        what reads them later does. Raises SwapSpaceError with them still in memory."""
        params, others = self._mine(params)
        for swapper, its_params in others.items():
            swapper.swap_out_and_release(its_params)
        with self._lock:
            self._residence.raise_failed_writes()
            for param in params:
                partition = self._known(param)
                if not partition.is_shown():
                    shown = param.ds_tensor.data
                    if shown.numel() != partition.numel:
                        raise SwapUsageError(
                            f"parameter {param.ds_id} is not in memory, so it can't be written"
                        )
                    self._residence.hold(partition)
                    partition.view().copy_(shown.view(-1))
                    param.ds_tensor.data = partition.view()
                self._residence.write(partition)

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing to do: what is written after a step takes buffers as it comes."""

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, cast to the parameters' dtype. Raises as `swap_out_and_release`; what
        had been read ahead is forgotten."""
        with self._lock:
            self._residence.raise_failed_writes()
            for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
                partition = self._known(param)
                self._residence.hold(partition)
                try:
                    partition.view().copy_(source.reshape(-1))
                    self._residence.write(partition)
                except BaseException:
                    self._residence.take_back(partition)
                    raise

    def synchronize_writes(self) -> None:
        """Wait for all writes; raises the first error."""
        with self._lock:
            self._residence.synchronize_writes()

    # --- what comes from NVMe --------------------------------------------------------------------

    def available_swap_in_buffers(self) -> int:
        """How many more partitions of the largest size can be read ahead."""
        with self._lock:
            return self._residence.left_nbytes // self._largest_nbytes

    def swap_in(
        self,
        params: Sequence[Any],
        async_op: bool = True,
        swap_in_buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Read partitions: all, and wait for these; or with `async_op` those for which there is
        memory, without waiting. `swap_in_buffers`: memory of the caller's for them, waited for."""
        if swap_in_buffers is None:
            params, others = self._mine(params)
            for swapper, its_params in others.items():
                swapper.swap_in(its_params, async_op)
        with self._lock:
            self._residence.raise_failed_writes()
            for param in params:
                if param.ds_tensor.status is not self._status.NOT_AVAILABLE:
                    raise SwapUsageError(
                        f"parameter {param.ds_id} is {param.ds_tensor.status.name}, so it can't be "
                        "read", fix="read what is NOT_AVAILABLE",
                    )
            if swap_in_buffers is not None:
                for param, destination in zip(params, swap_in_buffers, strict=True):
                    partition = self._known(param)
                    into = destination.view(-1)[: partition.numel]
                    self._residence.read_into(partition, into)
                    param.ds_tensor.data = into
                    param.ds_tensor.status = self._status.AVAILABLE
            elif async_op:
                for param in params:
                    if not self._residence.start(self._known(param), is_demand=False):
                        break
            else:
                self.make_available(params)

    def is_out(self, param: Any) -> bool:
        """Whether DeepSpeed must ask for the partition before it can use it."""
        partition = self._partitions.get(param.ds_id)
        return param.ds_tensor.status is not self._status.AVAILABLE or (
            partition is not None and self._residence.is_read_ahead(partition)
        )

    def make_available(self, params: Sequence[Any]) -> None:
        """Wait until these are in memory; other reads go on. For DeepSpeed's all-gather."""
        with self._lock:
            self._residence.raise_failed_writes()
            partitions = [self._known(param) for param in params]
            self._residence.make_available(partitions)

    def synchronize_reads(self) -> None:
        """Wait for all reads under way."""
        with self._lock:
            self._residence.synchronize_reads()

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """DeepSpeed needs them no longer; nothing is written."""
        params, others = self._mine(params)
        for swapper, its_params in others.items():
            swapper.remove_partition_and_release_buffers(its_params)
        with self._lock:
            for param in params:
                partition = self._partitions.get(param.ds_id)
                if partition is None:
                    self._residence.hide(param)
                else:
                    self._residence.release(partition)

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into memory of the caller's; it stays on NVMe as well."""
        with self._lock:
            self._residence.raise_failed_writes()
            self._residence.read_into(self._known(param), dest_buffer.view(-1))

    def copy_of(self, param: Any) -> torch.Tensor:
        """The partition, in memory of its own."""
        with self._lock:
            partition = self._known(param)
            copy = torch.empty(partition.numel, dtype=partition.dtype, device="cpu")
            self._residence.read_into(partition, copy)
            return copy

    def get_path(self, param: Any, must_exist: bool = False) -> str:
        """A file with the partition's bytes from its beginning on, made by this call: it does not
        follow later writes. Raises SwapUsageError if it must exist and was never written."""
        path = Path(self.swap_folder) / f"{param.ds_id}_param.tensor.swp"
        with self._lock:
            partition = self._partitions.get(param.ds_id)
            if partition is not None and partition.is_on_drive:
                self._copies.append(path)
                _write_raw(path, self.copy_of(param))
            elif must_exist:
                raise SwapUsageError(f"parameter {param.ds_id} was never written", path=path)
        return str(path)

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """For `fast_init`: DeepSpeed wants at least one, for its optimizer swapper, and ours does
        not need it: an empty one."""
        return [torch.empty(0, dtype=self.dtype, device="cpu")]

    def release_reserved_buffers(self) -> None:
        """The end of `fast_init`: the files that `get_path` has made go."""
        with self._lock:
            while self._copies:
                self._copies.pop().unlink(missing_ok=True)

    def trim(self) -> None:
        """Give back the memory of all that is on NVMe and not in use."""
        with self._lock:
            self._residence.synchronize_writes()
            self._residence.forget_copies()
            self._buffers.close()

    def stats(self) -> StoreStats:
        """Counters since the start."""
        return self._store.stats()

    def close(self) -> None:
        """Wait for what is under way and remove the folder; DeepSpeed's partitions are gone then.
        Raises the error of a write that failed."""
        with self._lock:
            try:
                self.trim()
            finally:
                self._store.close()
                self._finalizer.detach()

    # --- inside ----------------------------------------------------------------------------------

    def _mine(self, params: Sequence[Any]) -> tuple[list[Any], dict[ParameterSwapper, list[Any]]]:
        """DeepSpeed gives the parameters of several `zero.Init` to the swapper of the first."""
        mine: list[Any] = []
        others: dict[ParameterSwapper, list[Any]] = {}
        for param in params:
            swapper = getattr(param, "nvme_swapper", self)
            is_others = swapper is not self and isinstance(swapper, ParameterSwapper)
            (others.setdefault(swapper, []) if is_others else mine).append(param)
        return mine, others

    def _known(self, param: Any) -> Partition:
        partition = self._partitions.get(param.ds_id)
        if partition is None:
            raise SwapUsageError(f"parameter {param.ds_id} has no partition on NVMe",
                                 fix="write it first, by get_buffer and swap_out_and_release")
        partition.param = param
        return partition


def _write_raw(path: Path, tensor: torch.Tensor) -> None:
    try:
        path.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    except OSError as error:
        kind = SwapSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else SwapWriteError
        raise kind(
            "a partition could not be copied to a file of its own", path=path,
            wanted_nbytes=tensor.nbytes, errno=error.errno, intact="what is stored",
            fix="free space on this filesystem, or leave offload_optimizer.fast_init out",
        ) from error
