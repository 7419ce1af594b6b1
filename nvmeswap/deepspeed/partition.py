"""One parameter's partition as the swapper sees it: where its bytes are now."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from nvmeswap.deepspeed.buffers import HostBuffer
from nvmeswap.store.store import StoreRequest


class Place(enum.Enum):
    """Where a partition is. DeepSpeed's status is AVAILABLE for HELD and READY, INFLIGHT for
    READING, and NOT_AVAILABLE for the others.

        HELD    -> STORED            written (its buffer serves until that is over)
        STORED  -> READING           a read was started, or what is being written will do
        STORED  -> CACHED            the write is over, and memory for it was left
        READING -> READY             somebody waited for the read; or the write is over
        READING -> HELD              the write that it was to be taken from failed
        READING -> STORED            dropped, or failed
        CACHED  -> READY, STORED     asked for; or its memory was needed
        READY   -> HELD              demanded: DeepSpeed uses it from now on
        READY   -> CACHED            dropped for want of memory, or overtaken by an update
        HELD    -> CACHED            released
    """

    HELD = "in its buffer, in DeepSpeed's hands"
    STORED = "on NVMe"
    READING = "on its way"
    READY = "read ahead"
    CACHED = "on NVMe, and in a buffer"


@dataclass(eq=False, slots=True)
class Partition:
    """`param`: DeepSpeed's parameter, whose `ds_tensor` shows the partition."""

    param: Any
    dtype: torch.dtype
    numel: int
    place: Place = Place.HELD
    buffer: HostBuffer | None = None
    read: StoreRequest | None = None
    write: StoreRequest | None = None  # the last, until it is over
    is_on_drive: bool = False  # has space there
    is_saved: bool = False  # and there is what the buffer has, or is being written

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"{self.param.ds_id}"

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self) -> torch.Tensor:
        """Its elements in its buffer."""
        assert self.buffer is not None
        return self.buffer.view(self.dtype, self.numel)

    def is_shown(self) -> bool:
        """Whether DeepSpeed's tensor is the buffer's memory."""
        shown = self.param.ds_tensor.data
        return self.buffer is not None and shown.data_ptr() == self.buffer.memory.data_ptr()
