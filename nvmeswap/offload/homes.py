"""Where a block's bytes are while it is not on the device: page-locked memory, or NVMe.

Either way each tensor has a stand-in in host memory with its real shape, strides and values, which
is what `parameter.data` shows meanwhile: a view of the memory, or of the file, mapped. A mapped one
takes no memory until somebody reads it; the manager itself never does, it reads the drive directly,
with checksums.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from nvmeswap.config import AioConfig, SwapBlock, check_folders
from nvmeswap.errors import SwapConfigError, SwapReadError
from nvmeswap.io.engine import Lane
from nvmeswap.memory.budget import exact_slot_classes
from nvmeswap.offload.edits import can_be_seen, has_own_pages
from nvmeswap.offload.layout import BlockLayout, Segment, own_storage
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.space import Placement, PoolRequest, SwapSpace, new_run_name

# Trained tensors begin at multiples of this in an NVMe home, so that each can be written alone.
NVME_ALIGNMENT_NBYTES = 4096
_ANY_SIZE = 1 << 62


class BlockHome(Protocol):
    """The bytes of one block, at rest. Threads: the manager's lock guards it."""

    @property
    def is_in_memory(self) -> bool:
        """True if it is the stand-ins that hold the bytes."""

    @property
    def is_ready(self) -> bool:
        """True if `copy_to` would not wait for the drive."""

    def copy_to(self, out: torch.Tensor) -> list[StoreRequest]:
        """Fill `out` (uint8, the block's size, any device); on a GPU queued on the current stream.
        It is complete when what is returned is. Raises SwapReadError and its kin."""

    def write(self, begin_bytes: int, values: torch.Tensor) -> list[StoreRequest]:
        """Replace bytes (`values` uint8, host). They must stay unchanged until the requests that
        are returned are done. Raises SwapWriteError and its kin."""

    def read(self, begin_bytes: int, out: torch.Tensor) -> list[StoreRequest]:
        """Fill `out` (uint8, host), complete when the returned requests are. On NVMe `begin_bytes`
        is a multiple of `NVME_ALIGNMENT_NBYTES`."""

    def stand_in(self, segment: Segment) -> torch.UntypedStorage:
        """A segment's bytes in host memory."""

    def was_edited(self) -> bool:
        """True if stand-ins differ from what is stored, because somebody wrote to them."""

    def forget_edits(self) -> None:
        """Stand-ins show what is stored."""


class RamHome:
    """`memory`: uint8, host, the block's size; page-locked if it is to be copied at full speed."""

    is_in_memory = True
    is_ready = True

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def copy_to(self, out: torch.Tensor) -> list[StoreRequest]:
        out.copy_(self.memory, non_blocking=True)
        return []

    def write(self, begin_bytes: int, values: torch.Tensor) -> list[StoreRequest]:
        self.memory[begin_bytes : begin_bytes + values.numel()].copy_(values)
        return []

    def read(self, begin_bytes: int, out: torch.Tensor) -> list[StoreRequest]:
        out.copy_(self.memory[begin_bytes : begin_bytes + out.numel()])
        return []

    def stand_in(self, segment: Segment) -> torch.UntypedStorage:
        begin = segment.offset_bytes
        return own_storage(self.memory[begin : begin + segment.nbytes])

    def was_edited(self) -> bool:
        return False  # they are what is stored

    def forget_edits(self) -> None: ...


class NvmeHome:
    """A block in params.swp, through the parameter swapper. `is_direct`: the device is the host,
    and read to without a slot."""

    is_in_memory = False

    def __init__(
        self, key: str, layout: BlockLayout, swapper: PartitionedParamSwapper, space: SwapSpace,
        *, is_direct: bool,
    ) -> None:
        assert space.store is not None
        self.key = key
        self._is_direct = is_direct
        self._nbytes = layout.nbytes
        self._ends = {
            each.segment.offset_bytes + each.segment.nbytes for each in layout.sources
        }
        self._swapper = swapper
        # Where own pages can't be seen, a write that torch does not count is to fail the checksum.
        self._is_private = can_be_seen()
        self._mapping, self._offset_bytes = space.store.mapped(key, is_private=self._is_private)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()

    @property
    def is_ready(self) -> bool:
        return self._is_direct or self._swapper.is_ready(self.key)

    def copy_to(self, out: torch.Tensor) -> list[StoreRequest]:
        if self._is_direct:
            return self._swapper.read_part(self.key, 0, out, Lane.DEMAND)
        self._swapper.fetch(self.key, out)
        return []

    def write(self, begin_bytes: int, values: torch.Tensor) -> list[StoreRequest]:
        # A direct write is of whole blocks of the drive, but at the end of what is stored.
        before = begin_bytes % NVME_ALIGNMENT_NBYTES
        end_bytes = begin_bytes + values.numel()
        behind = 0 if end_bytes == self._nbytes else -end_bytes % NVME_ALIGNMENT_NBYTES
        if before or behind:
            whole = values.new_zeros(before + values.numel() + behind)
            if before or end_bytes not in self._ends:  # behind a segment is nothing
                self._read_edges(begin_bytes - before, whole)
            whole[before : before + values.numel()].copy_(values)
            values = whole
        return self._swapper.update(self.key, begin_bytes - before, values)

    def _read_edges(self, begin_bytes: int, whole: torch.Tensor) -> None:
        last = whole.numel() - NVME_ALIGNMENT_NBYTES
        for offset in {0, last}:
            edge = whole[offset : offset + NVME_ALIGNMENT_NBYTES]
            for request in self.read(begin_bytes + offset, edge):
                request.wait()

    def read(self, begin_bytes: int, out: torch.Tensor) -> list[StoreRequest]:
        return self._swapper.read_part(self.key, begin_bytes, out, Lane.DEMAND)

    def stand_in(self, segment: Segment) -> torch.UntypedStorage:
        if not segment.nbytes:
            return torch.UntypedStorage(0)
        return torch.frombuffer(
            self._mapping, dtype=torch.uint8, count=segment.nbytes,
            offset=self._offset_bytes + segment.offset_bytes,
        ).untyped_storage()

    def was_edited(self) -> bool:
        if not self._is_private:
            return False
        try:
            return has_own_pages(self._address + self._offset_bytes, self._nbytes)
        except OSError as error:
            raise SwapReadError(
                f"nobody can tell whether the weights of {self.key} were written to",
                path="/proc/self/pagemap",
                errno=error.errno,
                intact="both: what is stored, and what was written",
                fix="raise `ulimit -n` for EMFILE, and call the model again",
            ) from error

    def forget_edits(self) -> None:
        if self._is_private:
            self._mapping.madvise(mmap.MADV_DONTNEED, self._offset_bytes, self._nbytes)


class Homes:
    """Makes and keeps the homes of all blocks, and the memory, files and engine behind them.

    Args: by block name `in_ram` sizes in bytes, `on_nvme` layouts; `is_direct`, the device is the
    host, and needs no slots; `buffer_count`, slots a size class for what comes from NVMe;
    `max_in_cpu`, bytes of it that are kept there between uses.
    Raises: SwapBudgetError, SwapPathError, SwapSpaceError before anything of the model is touched.
    Blocking: construction takes all memory and all space.
    """

    def __init__(
        self,
        *,
        in_ram: Mapping[str, int],
        on_nvme: Mapping[str, BlockLayout],
        path: str | Path | None,
        is_direct: bool,
        pin_memory: bool,
        buffer_count: int,
        max_in_cpu: int,
        swap: SwapBlock,
        aio: AioConfig,
    ) -> None:
        specs = [ShardSpec(name, each.nbytes, torch.uint8) for name, each in on_nvme.items()]
        largest_slot_nbytes = 0 if is_direct else _ANY_SIZE
        placement = ParamPlacement(True, 0, buffer_count, largest_slot_nbytes, max_in_cpu)
        pools = {
            "weights in memory": PoolRequest(exact_slot_classes(in_ram.values()), shrinks=False),
            "weights from NVMe": PoolRequest(placement.slot_classes(specs)),
        }
        folders = check_folders(path, key="path") if specs else ()
        if len(folders) > 1:
            raise SwapConfigError(
                "module offload uses one drive", key="path",
                fix="name one folder; a RAID 0 of several drives is one",
            )
        self.space = SwapSpace(
            Placement(folders, new_run_name()), pools, swap=swap, aio=aio, pin_memory=pin_memory
        )
        try:
            self.swapper = PartitionedParamSwapper(
                specs, placement, store=self.space.store,
                pool=self.space.pools["weights from NVMe"], timeout_s=self.space.timeout_s,
                ahead=Lane.DEMAND,  # the prefetch lane is kept short for others, and there are none
            )
            self._homes: dict[str, BlockHome] = {
                name: NvmeHome(name, layout, self.swapper, self.space, is_direct=is_direct)
                for name, layout in on_nvme.items()
            }
            pool = self.space.pools["weights in memory"]
            for name, nbytes in in_ram.items():
                memory = torch.empty(0, dtype=torch.uint8, device="cpu")
                if pool is not None and nbytes:
                    slot = pool.acquire(nbytes, holder=name, timeout_s=0)
                    memory = slot.memory[:nbytes]
                self._homes[name] = RamHome(memory[:nbytes])
        except BaseException:
            self.space.close()
            raise

    def home(self, block: str) -> BlockHome:
        return self._homes[block]

    def expect(self, order: Sequence[str]) -> None:
        """The blocks that are going to be used, in this order: reads from NVMe run ahead by it."""
        self.swapper.expect([name for name in order if name in self.swapper])

    @property
    def host_nbytes(self) -> int:
        """Of memory taken: homes and slots."""
        return 0 if self.space.arena is None else self.space.arena.nbytes

    def close(self) -> None:
        """Remove files and give the memory back; who holds a stand-in keeps what it shows."""
        self.space.close()


def kept_in_ram(sizes: Mapping[str, int]) -> set[str]:
    """Of blocks for NVMe the smallest, as long as they are 1/256 of all bytes together: reading
    those would cost a drive's latency each, and saves nothing."""
    left_nbytes = sum(sizes.values()) >> 8
    kept = set()
    for name in sorted(sizes, key=lambda name: sizes[name]):
        left_nbytes -= sizes[name]
        if left_nbytes < 0:
            break
        kept.add(name)
    return kept

