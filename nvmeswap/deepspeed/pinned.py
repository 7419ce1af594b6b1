"""Page-locked tensors for DeepSpeed's engine API: each in memory of its own, exactly as large as
asked for.

One table serves the whole process, as in DeepSpeed: what one handle has allocated every other
handle knows. Freed memory is gone from the table at once, but stays mapped for as long as a tensor
shows it, and page-locked and registered until the last transfer in it is over.
"""

from __future__ import annotations

import bisect
import os
import threading
import weakref

import torch

from nvmeswap.errors import SwapClosedError, SwapUsageError
from nvmeswap.io import Engine
from nvmeswap.memory.arena import Arena

# Less than a huge page is not worth an entry in the kernel's table.
_REGISTERED_FROM_NBYTES = 2 << 20


class PinnedBlock:
    """One allocation, and who still needs it. Made by `PinnedMemory`, which does the locking."""

    def __init__(self, arena: Arena) -> None:
        self.memory = arena.memory
        self.begin = arena.memory.data_ptr()
        self.end = self.begin + arena.memory.nbytes
        self.arena = arena
        self.transfer_count = 0
        self.freed = False
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def register_with(self, engine: Engine) -> None:
        if self.memory.nbytes >= _REGISTERED_FROM_NBYTES and engine not in self.engines:
            engine.register_memory(self.memory)
            self.engines.add(engine)

    def release(self) -> None:
        for engine in self.engines:
            try:
                engine.unregister_memory(self.memory)
            except SwapClosedError:
                continue
        self.arena.close()


class PinnedMemory:
    """The table of page-locked blocks. Threads: any. In a forked child it is empty, because the
    parent's blocks are not mapped there."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty. For a forked child, where another thread may have held the lock."""
        # Reentrant: the collector may drop a handle, which ends transfers, in the middle of a call.
        self._lock = threading.RLock()
        self._begins: list[int] = []  # sorted, for finding the block that holds an address
        self._blocks: dict[int, PinnedBlock] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat CPU tensor, its content undefined. Raises SwapUsageError for a negative size,
        SwapBudgetError when the kernel refuses the memory. Warns when it can't be locked."""
        if numel < 0:
            raise SwapUsageError(f"a tensor of {numel} elements was asked for")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = PinnedBlock(Arena(numel * dtype.itemsize))
        with self._lock:
            self._blocks[block.begin] = block
            bisect.insort(self._begins, block.begin)
        return block.memory.view(dtype)

    def free(self, address: int) -> bool:
        """Give back the block that begins there; False when none does. Never blocks for I/O."""
        with self._lock:
            block = self._blocks.pop(address, None)
            if block is None:
                return False
            self._begins.remove(address)
            block.freed = True
            if block.transfer_count == 0:
                block.release()
            return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does the tensor, or the one it is a view of, lie wholly in one block?"""
        with self._lock:
            return self._find(tensor) is not None

    def begin_transfer(self, tensor: torch.Tensor, engine: Engine) -> PinnedBlock | None:
        """Keep the tensor's block, registered with the engine, until `end_transfer`. None when it
        lies in no block."""
        with self._lock:
            block = self._find(tensor)
            if block is not None:
                block.register_with(engine)
                block.transfer_count += 1
            return block

    def end_transfer(self, block: PinnedBlock) -> None:
        """The counterpart of `begin_transfer`."""
        with self._lock:
            block.transfer_count -= 1
            if block.freed and block.transfer_count == 0:
                block.release()

    def _find(self, tensor: torch.Tensor) -> PinnedBlock | None:
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in strides)
        begin = tensor.data_ptr()
        end = begin + (last + 1) * tensor.element_size()
        index = bisect.bisect_right(self._begins, begin) - 1
        if index < 0:
            return None
        block = self._blocks[self._begins[index]]
        return block if end <= block.end else None


pinned_memory = PinnedMemory()
os.register_at_fork(after_in_child=pinned_memory.forget)


class pin_handle:
    """The face of DeepSpeed's `pin_memory` op. All handles share one table. Threads: any."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A flat page-locked CPU tensor of `num_elem` elements of the example's dtype.

        Raises SwapUsageError, SwapBudgetError. Blocks for populating the memory, 0.13 s a GiB."""
        return pinned_memory.allocate(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Give the memory back; False for a tensor that did not come from a handle. Views stay
        readable, and a transfer under way ends first."""
        return pinned_memory.free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """The same by the address at which the tensor began."""
        return pinned_memory.free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Is it page-locked, by torch or by a handle?"""
        return buffer.is_pinned() or pinned_memory.holds(buffer)
