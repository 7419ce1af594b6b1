"""`ParameterSwapper`: DeepSpeed's AsyncPartitionedParameterSwapper, on our store.

DeepSpeed's rules are kept (its own status enum, 0-dim data of what is on NVMe). What differs:

- A demand waits for its own reads, and for nothing else.
- `buffer_count * buffer_size` elements are a budget of bytes. Each partition takes its own size of
  it. What was released stays in memory for as long as there is room, and is not read again: in
  backward that is what forward used last, and in the next forward what backward used last.
- Where the budget is used up: what is cached goes first, then what was read ahead and not asked
  for; then a write is waited for; and only then more memory is taken, with a warning.
- Writes go on in the background, and every result is looked at. One that failed is raised by the
  next call, with the partition back in memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeswap.deepspeed.buffers import HostBuffer, HostBuffers
from nvmeswap.deepspeed.partition import Partition, Place
from nvmeswap.deepspeed.space import open_store
from nvmeswap.errors import SwapUsageError
from nvmeswap.io import Lane
from nvmeswap.stats import StoreStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import StoreRequest

SWAPPABLE_NBYTES = 1 << 20  # as in DeepSpeed, where it grows with aio.block_size
_FILE = "params.swp"


class _Write(NamedTuple):
    partition: Partition
    buffer: HostBuffer
    request: StoreRequest


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
        self._lock = threading.RLock()
        self._partitions: dict[int, Partition] = {}  # by ds_id
        self._reading: dict[Partition, None] = {}  # and READY: in the order they were asked for
        self._cached: OrderedDict[Partition, None] = OrderedDict()  # the longest unused first
        self._writes: deque[_Write] = deque()
        self._reserved: list[HostBuffer] = []
        self._placeholder = torch.tensor(1, dtype=torch.float16)
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
            self._raise_failed_writes()
            partition = self._partitions.get(param.ds_id)
            if partition is None:
                partition = Partition(param, self.dtype, numel)
                self._partitions[param.ds_id] = partition
            elif partition.numel != numel:
                raise SwapUsageError(
                    f"parameter {param.ds_id} has a partition of {partition.numel:_} elements, "
                    f"not {numel:_}"
                )
            self._hold(partition)
            return partition.view()

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write partitions; their memory is not DeepSpeed's any more. Does not wait for the drive:
        what reads them later does. Raises SwapSpaceError with them still in memory."""
        with self._lock:
            self._raise_failed_writes()
            for param in params:
                partition = self._known(param)
                if not partition.is_shown():
                    shown = param.ds_tensor.data
                    if shown.numel() != partition.numel:
                        raise SwapUsageError(
                            f"parameter {param.ds_id} is not in memory, so it can't be written"
                        )
                    self._hold(partition)
                    partition.view().copy_(shown.view(-1))
                    param.ds_tensor.data = partition.view()
                self._write(partition)

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing to do: what is written after a step takes buffers as it comes."""

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, cast to the parameters' dtype. Raises as `swap_out_and_release`; what
        had been read ahead is forgotten."""
        with self._lock:
            self._raise_failed_writes()
            for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
                partition = self._known(param)
                self._hold(partition)
                partition.view().copy_(source.view(-1))
                self._write(partition)

    def synchronize_writes(self) -> None:
        """Wait for all writes; raises the first error."""
        with self._lock:
            while self._writes:
                self._end_write(self._writes.popleft())

    # --- what comes from NVMe --------------------------------------------------------------------

    def available_swap_in_buffers(self) -> int:
        """How many more partitions of the largest size can be read ahead."""
        with self._lock:
            largest = max((each.nbytes for each in self._partitions.values()), default=1)
            cached_nbytes = sum(each.nbytes for each in self._cached)
            return (self._buffers.left_nbytes + cached_nbytes) // largest

    def swap_in(
        self,
        params: Sequence[Any],
        async_op: bool = True,
        swap_in_buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Read partitions: all, and wait for these; or with `async_op` those for which there is
        memory, without waiting. `swap_in_buffers`: memory of the caller's for them, waited for."""
        with self._lock:
            self._raise_failed_writes()
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
                    self._read_into(partition, into)
                    param.ds_tensor.data = into
                    param.ds_tensor.status = self._status.AVAILABLE
            elif async_op:
                for param in params:
                    if not self._start(self._known(param), is_demand=False):
                        break
            else:
                self.make_available(params)

    def is_swapped_out(self, param: Any) -> bool:
        """Whether DeepSpeed must ask for the partition before it can use it."""
        return param.ds_tensor.status is not self._status.AVAILABLE or (
            param.ds_id in self._partitions and self._partitions[param.ds_id] in self._reading
        )

    def make_available(self, params: Sequence[Any]) -> None:
        """Wait until these are in memory; other reads go on. For DeepSpeed's all-gather."""
        with self._lock:
            self._raise_failed_writes()
            partitions = [self._known(param) for param in params]
            for partition in partitions:
                self._start(partition, is_demand=True)
            for partition in partitions:
                self._finish(partition)
                self._reading.pop(partition, None)
                partition.place = Place.HELD

    def synchronize_reads(self) -> None:
        """Wait for all reads under way."""
        with self._lock:
            for partition in list(self._reading):
                self._finish(partition)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """DeepSpeed needs them no longer; nothing is written."""
        with self._lock:
            for param in params:
                partition = self._partitions.get(param.ds_id)
                if partition is None:
                    self._hide(param)
                else:
                    self._release(partition)

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into memory of the caller's; it stays on NVMe as well."""
        with self._lock:
            self._raise_failed_writes()
            self._read_into(self._known(param), dest_buffer.view(-1))

    def get_path(self, param: Any, must_exist: bool = False) -> str:
        """A file with the partition's bytes from its beginning on, made by this call: it does not
        follow later writes. Raises SwapUsageError if it must exist and was never written."""
        path = Path(self.swap_folder) / f"{param.ds_id}_param.tensor.swp"
        with self._lock:
            partition = self._partitions.get(param.ds_id)
            if partition is not None and partition.is_on_drive:
                copy = torch.empty(partition.numel, dtype=partition.dtype)
                self._read_into(partition, copy)
                path.write_bytes(copy.view(torch.uint8).numpy().tobytes())
            elif must_exist:
                raise SwapUsageError(f"parameter {param.ds_id} was never written", path=path)
        return str(path)

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """One buffer of `buffer_size` elements, until `release_reserved_buffers`."""
        with self._lock:
            buffer = self._take(self._buffer_numel * self.dtype.itemsize, is_demand=True)
            assert buffer is not None
            self._reserved.append(buffer)
            return [buffer.view(self.dtype, self._buffer_numel)]

    def release_reserved_buffers(self) -> None:
        """Take them back."""
        with self._lock:
            while self._reserved:
                self._buffers.give_back(self._reserved.pop())

    def stats(self) -> StoreStats:
        """Counters since the start."""
        return self._store.stats()

    def close(self) -> None:
        """Wait for what is under way and remove the folder; DeepSpeed's partitions are gone then.
        Raises the error of a write that failed."""
        with self._lock:
            try:
                self.synchronize_writes()
            finally:
                self._finalizer()
                self._buffers.close()

    # --- inside ----------------------------------------------------------------------------------

    def _known(self, param: Any) -> Partition:
        partition = self._partitions.get(param.ds_id)
        if partition is None:
            raise SwapUsageError(f"parameter {param.ds_id} has no partition on NVMe",
                                 fix="write it first, by get_buffer and swap_out_and_release")
        partition.param = param
        return partition

    def _hold(self, partition: Partition) -> None:
        """Its buffer is DeepSpeed's, or ours to fill, whatever is on its way or cached."""
        self._forget_read(partition)
        if partition.buffer is None:
            partition.buffer = self._take(partition.nbytes, is_demand=True)
        self._cached.pop(partition, None)
        partition.place = Place.HELD

    def _write(self, partition: Partition) -> None:
        param, buffer = partition.param, partition.buffer
        assert partition.place is Place.HELD and buffer is not None
        if not partition.is_on_drive:
            shape = (partition.numel,)
            self._store.allocate(_FILE, partition.key, TensorSpec(partition.dtype, shape, (1,)))
            partition.is_on_drive = True
        request = self._store.write(partition.key, partition.view(), lane=Lane.WRITEBACK)
        self._writes.append(_Write(partition, buffer, request))
        partition.place, partition.buffer = Place.STORED, None
        self._hide(param)

    def _end_write(self, write: _Write) -> None:
        """Waits for it; its buffer is kept as a copy, unless the partition has another by now."""
        partition = write.partition
        try:
            write.request.wait()
        except BaseException:
            if partition.place is Place.STORED:
                partition.place, partition.buffer = Place.HELD, write.buffer
                self._show(partition)
            else:
                self._buffers.give_back(write.buffer)
            raise
        if partition.place is Place.STORED:
            partition.buffer, partition.place = write.buffer, Place.CACHED
            self._cached[partition] = None
            self._cached.move_to_end(partition, last=False)
        else:
            self._buffers.give_back(write.buffer)

    def _raise_failed_writes(self) -> None:
        while self._writes and self._writes[0].request.done():
            self._end_write(self._writes.popleft())

    def _start(self, partition: Partition, *, is_demand: bool) -> bool:
        """Begins to bring it into memory, or has it there; False if there is no memory for what is
        not demanded."""
        if partition.place in (Place.HELD, Place.READY, Place.READING):
            return True
        if partition.place is Place.STORED and self._takes_from_write(partition):
            pass
        elif partition.place is Place.STORED:
            buffer = self._take(partition.nbytes, is_demand=is_demand)
            if buffer is None:
                return False
            lane = Lane.DEMAND if is_demand else Lane.PREFETCH
            into = buffer.view(partition.dtype, partition.numel)
            try:
                partition.read = self._store.read(partition.key, into, lane=lane)
            except BaseException:
                self._buffers.give_back(buffer)
                raise
            partition.place, partition.buffer = Place.READING, buffer
            partition.param.ds_tensor.status = self._status.INFLIGHT
            self._reading[partition] = None
            return True
        self._cached.pop(partition, None)
        partition.place = Place.READY
        self._reading[partition] = None
        self._show(partition)
        return True

    def _takes_from_write(self, partition: Partition) -> bool:
        """Whether it is being written, and was taken from there when that was over."""
        for write in self._writes:
            if write.partition is partition:
                self._writes.remove(write)
                self._end_write(write)
                return partition.place is Place.CACHED
        return False

    def _finish(self, partition: Partition) -> None:
        """Waits for its read and shows it to DeepSpeed."""
        if partition.place is not Place.READING:
            return
        assert partition.read is not None
        try:
            partition.read.wait()
        except BaseException:
            self._forget_read(partition)
            raise
        partition.read = None
        partition.place = Place.READY
        self._show(partition)

    def _forget_read(self, partition: Partition) -> None:
        """If it was read ahead: drops what is on its way, and what came of it becomes a copy."""
        self._reading.pop(partition, None)
        if partition.place is Place.READING:
            assert partition.read is not None and partition.buffer is not None
            partition.read.drop()
            partition.read.settle()
            self._buffers.give_back(partition.buffer)
            partition.read = partition.buffer = None
            partition.place = Place.STORED
            self._hide(partition.param)
        elif partition.place is Place.READY:
            partition.place = Place.CACHED
            self._cached[partition] = None
            self._hide(partition.param)

    def _release(self, partition: Partition) -> None:
        self._forget_read(partition)
        if partition.place is Place.HELD:
            buffer = partition.buffer
            assert buffer is not None
            if partition.is_gathered_in_place():
                self._buffers.abandon(buffer)  # the parameter stays for good, as persistent ones do
                partition.buffer, partition.place = None, Place.STORED
            elif partition.is_on_drive and partition.is_shown():
                partition.place = Place.CACHED
                self._cached[partition] = None
            else:
                self._buffers.give_back(buffer)
                partition.buffer, partition.place = None, Place.STORED
        self._hide(partition.param)

    def _read_into(self, partition: Partition, into: torch.Tensor) -> None:
        """A copy of what is stored, or held."""
        if partition.buffer is not None and partition.place is not Place.READING:
            into[: partition.numel].copy_(partition.view())
            return
        if into.device.type == "cpu" and into.dtype is partition.dtype and into.is_contiguous():
            target = into[: partition.numel]
            self._store.read(partition.key, target, lane=Lane.DEMAND).wait()
            return
        copy = torch.empty(partition.numel, dtype=partition.dtype)
        self._store.read(partition.key, copy, lane=Lane.DEMAND).wait()
        into[: partition.numel].copy_(copy)

    def _take(self, nbytes: int, *, is_demand: bool) -> HostBuffer | None:
        while (buffer := self._buffers.take(nbytes)) is None:
            if self._cached:
                partition, _ = self._cached.popitem(last=False)
                assert partition.buffer is not None
                self._buffers.give_back(partition.buffer)
                partition.buffer, partition.place = None, Place.STORED
            elif not is_demand:
                return None
            elif self._writes:
                self._end_write(self._writes.popleft())
            elif self._reading:
                latest = next(reversed(self._reading))
                self._forget_read(latest)
            else:
                return self._buffers.take_beyond(nbytes)
        return buffer

    def _show(self, partition: Partition) -> None:
        partition.param.ds_tensor.data = partition.view()
        partition.param.ds_tensor.status = self._status.AVAILABLE

    def _hide(self, param: Any) -> None:
        param.ds_tensor.data = self._placeholder.data
        param.ds_tensor.status = self._status.NOT_AVAILABLE
