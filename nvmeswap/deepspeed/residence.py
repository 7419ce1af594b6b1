"""Which partitions are in memory, which are on their way, and what has to go for others.

Where the budget is used up: what is cached goes first, the longest unused before the others; then a
write is waited for, whose buffer is free then; then what was read ahead last and not asked for is
dropped; and only then more memory is taken, with a warning.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeswap.deepspeed.buffers import HostBuffer, HostBuffers
from nvmeswap.deepspeed.partition import Partition, Place
from nvmeswap.errors import SwapError, SwapTimeoutError
from nvmeswap.io import Lane
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store, StoreRequest

_FILE = "params.swp"


class _Write(NamedTuple):
    partition: Partition
    buffer: HostBuffer
    request: StoreRequest


class Residence:
    """The partitions of one store and its buffers, and how DeepSpeed sees them: `status` is its
    enum PartitionedParamStatus, and what is not in memory has 0-dim data.

    Threads: one at a time; its owner does the locking. Raises what the store raises.
    """

    def __init__(self, store: Store, buffers: HostBuffers, status: Any) -> None:
        self._store = store
        self._buffers = buffers
        self._status = status
        self._reading: dict[Partition, None] = {}  # or READY, in the order they were asked for
        self._cached: OrderedDict[Partition, None] = OrderedDict()  # the longest unused first
        self._writes: deque[_Write] = deque()
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}

    @property
    def left_nbytes(self) -> int:
        """Bytes that what is read ahead can still take."""
        return self._buffers.left_nbytes + sum(each.nbytes for each in self._cached)

    def is_read_ahead(self, partition: Partition) -> bool:
        """Whether nobody has asked for it yet."""
        return partition in self._reading

    def hold(self, partition: Partition) -> None:
        """Its buffer is DeepSpeed's, or ours to fill, whatever is on its way or cached."""
        self._forget_read(partition)
        if partition.buffer is None:
            partition.buffer = self.take(partition.nbytes, is_demand=True)
        self._cached.pop(partition, None)
        partition.place, partition.is_saved = Place.HELD, False

    def take_back(self, partition: Partition) -> None:
        """Undoes `hold`, where what was to be written did not come about: what is on the drive
        counts."""
        if partition.place is Place.HELD and partition.is_on_drive:
            assert partition.buffer is not None
            self._buffers.give_back(partition.buffer)
            partition.buffer, partition.place, partition.is_saved = None, Place.STORED, True
            self.hide(partition.param)

    def write(self, partition: Partition) -> None:
        """Begins to write what its buffer has. Raises SwapSpaceError where it gets its space, and
        it is still held."""
        param, buffer = partition.param, partition.buffer
        assert partition.place is Place.HELD and buffer is not None
        partition.is_saved = False
        if not partition.is_on_drive:
            shape = (partition.numel,)
            self._store.allocate(_FILE, partition.key, TensorSpec(partition.dtype, shape, (1,)))
            partition.is_on_drive = True
        request = self._store.write(partition.key, partition.view(), lane=Lane.WRITEBACK)
        partition.write = request
        self._writes.append(_Write(partition, buffer, request))
        partition.place, partition.buffer, partition.is_saved = Place.STORED, None, True
        self.hide(param)

    def _end_write(self, write: _Write) -> None:
        """Waits for it. Its buffer is kept as a copy of what is stored, or, if it failed, as the
        only one; unless the partition was written once more since, or is in memory again."""
        partition, buffer, request = write
        del write  # its request shows the buffer
        error: SwapError | None = None
        try:
            request.wait()
        except SwapTimeoutError:  # the drive may still read the buffer
            self._writes.appendleft(_Write(partition, buffer, request))
            raise
        except SwapError as raised:
            error = raised
        is_last = partition.write is request
        if is_last:
            partition.write = None
        del request
        if not is_last or partition.place is not Place.STORED:
            self._buffers.give_back(buffer)
        elif error is None:
            partition.buffer, partition.place = buffer, Place.CACHED
            self._cached[partition] = None
            self._cached.move_to_end(partition, last=False)
        else:
            partition.buffer, partition.place = buffer, Place.HELD
            partition.is_saved = False
            self._show(partition)
        if error is not None:
            raise error

    def synchronize_writes(self) -> None:
        """Waits for all writes; raises the first error, after all."""
        errors: list[SwapError] = []
        while self._writes:
            try:
                self._end_write(self._writes.popleft())
            except SwapTimeoutError:
                raise
            except SwapError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def raise_failed_writes(self) -> None:
        """Looks at the writes that are over. Does not block."""
        while self._writes and self._writes[0].request.done():
            self._end_write(self._writes.popleft())

    def start(self, partition: Partition, *, is_demand: bool) -> bool:
        """Begins to bring it into memory, or has it there; False if there is no memory for what is
        not demanded."""
        if partition.place is Place.HELD and not partition.is_shown():
            self._show(partition)
        if partition.place in (Place.HELD, Place.READY, Place.READING):
            return True
        if partition.place is Place.STORED and self._takes_from_write(partition):
            pass
        elif partition.place is Place.STORED:
            buffer = self.take(partition.nbytes, is_demand=is_demand)
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
            if write.request is partition.write:
                self._writes.remove(write)
                self._end_write(write)
                return True
        return False

    def make_available(self, partitions: Sequence[Partition]) -> None:
        """Waits until these are in memory; other reads go on."""
        try:
            for partition in partitions:
                self.start(partition, is_demand=True)
                self._reading.pop(partition, None)  # so that the next does not drop it
            for partition in partitions:
                self._finish(partition)
                partition.place = Place.HELD
        except BaseException:
            for partition in partitions:
                if partition.place in (Place.READING, Place.READY):
                    self._reading[partition] = None
            raise

    def synchronize_reads(self) -> None:
        """Waits for all reads under way."""
        for partition in list(self._reading):
            self._finish(partition)

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
            self.hide(partition.param)
        elif partition.place is Place.READY:
            partition.place = Place.CACHED
            self._cached[partition] = None
            self.hide(partition.param)

    def forget_copies(self) -> None:
        """Gives back the memory of what is on NVMe as well."""
        for partition in list(self._reading):
            self._forget_read(partition)
        while self._cached:
            self._drop_oldest()

    def release(self, partition: Partition) -> None:
        """DeepSpeed needs it no longer."""
        self._forget_read(partition)
        if partition.place is Place.HELD:
            buffer = partition.buffer
            assert buffer is not None
            if partition.is_saved:
                partition.place = Place.CACHED
                self._cached[partition] = None
            elif partition.is_on_drive:
                self.write(partition)  # which had failed: there is no other copy
            else:
                self._buffers.give_back(buffer)
                partition.buffer, partition.place = None, Place.STORED
        self.hide(partition.param)

    def read_into(self, partition: Partition, into: torch.Tensor) -> None:
        """A copy of what is stored, or held."""
        if partition.buffer is not None and partition.place is not Place.READING:
            into[: partition.numel].copy_(partition.view())
            return
        if into.device.type == "cpu" and into.dtype is partition.dtype and into.is_contiguous():
            target = into[: partition.numel]
            self._store.read(partition.key, target, lane=Lane.DEMAND).wait()
            return
        copy = torch.empty(partition.numel, dtype=partition.dtype, device="cpu")
        self._store.read(partition.key, copy, lane=Lane.DEMAND).wait()
        into[: partition.numel].copy_(copy)

    def take(self, nbytes: int, *, is_demand: bool) -> HostBuffer | None:
        """Memory, at the cost of what needs it less; None only for what is not demanded."""
        while (buffer := self._buffers.take(nbytes)) is None:
            if self._cached:
                self._drop_oldest()
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

    def _drop_oldest(self) -> None:
        partition, _ = self._cached.popitem(last=False)
        assert partition.buffer is not None
        self._buffers.give_back(partition.buffer)
        partition.buffer, partition.place = None, Place.STORED

    def _show(self, partition: Partition) -> None:
        partition.param.ds_tensor.data = partition.view()
        partition.param.ds_tensor.status = self._status.AVAILABLE

    def hide(self, param: Any) -> None:
        """DeepSpeed's tensor shows nothing."""
        dtype = param.ds_tensor.dtype
        if dtype not in self._placeholders:
            self._placeholders[dtype] = torch.tensor(1, dtype=dtype, device="cpu")
        param.ds_tensor.data = self._placeholders[dtype].data
        param.ds_tensor.status = self._status.NOT_AVAILABLE
