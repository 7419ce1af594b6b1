"""Which partitions are in memory, which are on their way, and what has to go for others.

What DeepSpeed can see, a partition's status, must be the same on all ranks: its coordinator
gathers ahead what is not NOT_AVAILABLE, and ranks that differ there would meet in different
collectives. So what may be read ahead, and what is dropped for a demand (the last that was read
ahead), is decided by the sizes of what is in DeepSpeed's hands or read ahead, which comes of its
calls alone. How the memory for it is found depends on how long writes take, and is seen by nobody:
copies go first, the longest unused before the others; then a write is waited for, whose buffer is
free then; and only then more memory is taken, with a warning.
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
        self._held: set[Partition] = set()  # or on their way to that
        self._reading: dict[Partition, None] = {}  # or READY, in the order they were asked for
        self._cached: OrderedDict[Partition, None] = OrderedDict()  # the longest unused first
        self._writes: deque[_Write] = deque()
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}

    @property
    def left_nbytes(self) -> int:
        """Bytes that what is read ahead can still take."""
        return max(self._buffers.budget_nbytes - self._shown_nbytes, 0)

    @property
    def _shown_nbytes(self) -> int:
        held_nbytes = sum(each.nbytes for each in self._held)
        return held_nbytes + sum(each.nbytes for each in self._reading)

    def is_read_ahead(self, partition: Partition) -> bool:
        """Whether nobody has asked for it yet."""
        return partition in self._reading

    def hold(self, partition: Partition) -> None:
        """Its buffer is DeepSpeed's, or ours to fill, whatever is on its way or cached."""
        self._forget_read(partition)
        self._make_room(partition.nbytes)
        if partition.buffer is None:
            partition.buffer = self.take(partition.nbytes)
        self._cached.pop(partition, None)
        partition.place, partition.is_saved = Place.HELD, False
        self._held.add(partition)

    def take_back(self, partition: Partition) -> None:
        """Undoes `hold`, where what was to be written did not come about: what is on the drive
        counts."""
        if partition.place is Place.HELD and partition.is_on_drive:
            assert partition.buffer is not None
            self._held.discard(partition)
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
            spec = TensorSpec(partition.dtype, shape, (1,))
            self._store.allocate_many(_FILE, {partition.key: spec})
            partition.is_on_drive = True
        request = self._store.write(partition.key, partition.view(), lane=Lane.WRITEBACK)
        partition.write = request
        self._writes.append(_Write(partition, buffer, request))
        partition.place, partition.buffer, partition.is_saved = Place.STORED, None, True
        self._held.discard(partition)
        self.hide(param)

    def _end_write(self, write: _Write) -> None:
        """Waits for it. Its buffer is kept as a copy of what is stored, which is READY where it was
        asked for meanwhile, or, if it failed, as the only one; unless the partition was written
        once more since, or is in memory again."""
        partition, buffer, request = write
        del write  # its request shows the buffer
        error: SwapError | None = None
        try:
            request.wait()
        except BaseException as raised:
            is_over = isinstance(raised, SwapError) and not isinstance(raised, SwapTimeoutError)
            if not is_over:  # the drive may still read the buffer
                self._writes.appendleft(_Write(partition, buffer, request))
                raise
            assert isinstance(raised, SwapError)
            error = raised
        is_last = partition.write is request
        if is_last:
            partition.write = None
        del request
        is_awaited = partition.place is Place.READING and partition.read is None
        if not is_last or not (is_awaited or partition.place is Place.STORED):
            self._buffers.give_back(buffer)
        elif error is not None:
            partition.buffer, partition.place = buffer, Place.HELD
            partition.is_saved = False
            self._reading.pop(partition, None)
            self._held.add(partition)
            self._show(partition)
        elif is_awaited:
            partition.buffer, partition.place = buffer, Place.READY
            self._show(partition)
        else:
            partition.buffer, partition.place = buffer, Place.CACHED
            self._cached[partition] = None
            self._cached.move_to_end(partition, last=False)
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
        if is_demand:
            self._make_room(partition.nbytes)
        elif partition.nbytes > self.left_nbytes:
            return False
        if partition.write is not None:  # what is being written will do; who needs it waits for it
            partition.place = Place.READING
            partition.param.ds_tensor.status = self._status.INFLIGHT
            self._reading[partition] = None
            return True
        if partition.place is Place.STORED:
            buffer = self.take(partition.nbytes)
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

    def make_available(self, partitions: Sequence[Partition]) -> None:
        """Waits until these are in memory; other reads go on."""
        try:
            for partition in partitions:
                self.start(partition, is_demand=True)
                self._reading.pop(partition, None)  # so that the next does not drop it
                self._held.add(partition)
            for partition in partitions:
                self._finish(partition)
                partition.place = Place.HELD
        except BaseException:
            for partition in partitions:
                if partition.place in (Place.READING, Place.READY):
                    self._reading[partition] = None
                if partition.place is not Place.HELD:
                    self._held.discard(partition)
            raise

    def synchronize_reads(self) -> None:
        """Waits for all reads under way."""
        for partition in list(self._reading):
            self._finish(partition)

    def _finish(self, partition: Partition) -> None:
        """Waits for its read, or for the write that it is taken from, and shows it to DeepSpeed."""
        if partition.place is not Place.READING:
            return
        if partition.read is None:
            (write,) = [each for each in self._writes if each.request is partition.write]
            self._writes.remove(write)
            self._end_write(write)
            return
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
            if partition.read is not None:
                partition.read.drop()
                partition.read.settle()
            partition.read = None  # it shows the buffer
            partition.place = Place.STORED
            self.hide(partition.param)
            if partition.buffer is not None:
                self._buffers.give_back(partition.buffer)
                partition.buffer = None
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
            self._held.discard(partition)
            buffer = partition.buffer
            assert buffer is not None
            if partition.is_saved:
                partition.place = Place.CACHED
                self._cached[partition] = None
            elif partition.is_on_drive:
                self.write(partition)  # which had failed: there is no other copy
            else:
                self.hide(partition.param)
                partition.buffer, partition.place = None, Place.STORED
                self._buffers.give_back(buffer)
        self.hide(partition.param)

    def read_into(self, partition: Partition, into: torch.Tensor) -> None:
        """A copy of what is stored, or held."""
        if partition.buffer is not None and partition.place is not Place.READING:
            into[: partition.numel].copy_(partition.view())
            return
        if into.device.type == "cpu" and into.dtype is partition.dtype and into.is_contiguous():
            read = self._store.read(partition.key, into[: partition.numel], lane=Lane.DEMAND)
            try:
                read.wait()
            except BaseException:  # nothing may land in the caller's memory later
                read.drop()
                read.settle()
                raise
            return
        copy = torch.empty(partition.numel, dtype=partition.dtype, device="cpu")
        self._store.read(partition.key, copy, lane=Lane.DEMAND).wait()
        into[: partition.numel].copy_(copy)

    def _make_room(self, nbytes: int) -> None:
        """For what is demanded: drops what was read ahead, the last first, until it fits."""
        while self._reading and nbytes > self.left_nbytes:
            self._forget_read(next(reversed(self._reading)))

    def take(self, nbytes: int) -> HostBuffer:
        """Memory, at the cost of what nobody has asked for."""
        while (buffer := self._buffers.take(nbytes)) is None:
            if self._cached:
                self._drop_oldest()
            elif self._writes:
                self._end_write(self._writes.popleft())
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
