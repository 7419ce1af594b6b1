"""The swap space of one rank: engine, arena, pools and store, opened and closed together.

Everything is taken at the start and in this order, so that what can't work is refused before
anything was changed: budget, folder, engine, files, memory.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapConfigError, SwapPathError
from nvmeswap.io.drives import probe_folders
from nvmeswap.io.engine import BACKGROUND_NBYTES, DirectMode, Engine
from nvmeswap.io.gds import probe_gds
from nvmeswap.io.probe import FolderProbe
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.budget import preflight
from nvmeswap.memory.pool import Pool, SlotClass
from nvmeswap.store.store import Checksum, Store
from nvmeswap.swap.sub_group import SEGMENT_GRAIN_NUMEL

# Pieces of a bf16 shard begin at multiples of this in its file.
_LARGEST_ALIGNMENT_NBYTES = SEGMENT_GRAIN_NUMEL * 2
# Each moves one block at a time, so as many as it takes to keep a drive busy.
GDS_THREAD_COUNT = 8
_run_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Slots that a swapper asks for. `shrinks`: `least_count` slots a class are enough to work
    with. What is beyond `usual_count` (None: nothing) only uses memory that is left over."""

    classes: Sequence[SlotClass]
    shrinks: bool = True
    least_count: int = 1
    usual_count: int | None = None

    @property
    def nbytes(self) -> int:
        return Pool.nbytes_needed(self.classes)

    def is_spare(self, slots: SlotClass) -> bool:
        """True if the last of these slots only uses what is left over."""
        return self.usual_count is not None and slots.count > self.usual_count

    @property
    def smallest(self) -> PoolRequest:
        if not self.shrinks:
            return self
        least = [SlotClass(e.nbytes, min(e.count, self.least_count)) for e in self.classes]
        return replace(self, classes=least)


@dataclass(frozen=True, slots=True)
class Placement:
    """Whose swap space it is, and where. `folders`: one for each drive; none: nothing goes to NVMe.
    `run` must be the same on all ranks of a job and differ between jobs."""

    folders: tuple[Path, ...]
    run: str
    rank: int = 0
    world_size: int = 1


class SwapSpace:
    """Opens what the swappers of one rank share.

    `uses_gds`: the engine takes memory of a GPU, too: `use_gds` is set, and works in each folder
    (if not, one RuntimeWarning says why).

    Args: `pools`, the slots asked for by name; over `swap.host_memory_nbytes` those that shrink do;
    `moves_gpu_tensors`, whether memory of a GPU is moved, which is what `aio.use_gds` is for.
    Raises: SwapBudgetError before any allocation; SwapPathError, SwapOwnerError, SwapSpaceError.
    Blocking: construction probes the folder and populates memory. Threads: construct and close on
    one.
    Ownership: owns engine, store, arena and pools; `close` ends them all, in reverse order.
    """

    def __init__(
        self,
        placement: Placement,
        pools: Mapping[str, PoolRequest],
        *,
        swap: SwapBlock,
        aio: AioConfig,
        pin_memory: bool,
        moves_gpu_tensors: bool = False,
    ) -> None:
        self._moves_gpu_tensors = moves_gpu_tensors
        self.timeout_s = swap.timeout_s
        self.budget_nbytes = swap.host_memory_nbytes
        requests = fit(pools, swap.host_memory_nbytes, pin_memory=pin_memory)
        self.probe: FolderProbe | None = None
        self.engine: Engine | None = None
        self.uses_gds = False
        self.store: Store | None = None
        self.arena: Arena | None = None
        self.pools: dict[str, Pool | None] = {}
        try:
            if placement.folders:
                self._open_store(placement, swap, aio)
            self._open_memory(requests, pin_memory)
        except BaseException:
            self.close()
            raise

    def _open_store(self, placement: Placement, swap: SwapBlock, aio: AioConfig) -> None:
        folders = [folder.absolute() for folder in placement.folders]  # a later chdir: no matter
        direct = DirectMode[swap.direct.upper()]
        self.probe = probe_folders(folders, backend=swap.backend, direct=direct)
        coarsest = max(self.probe.drives, key=lambda drive: drive.offset_alignment_nbytes)
        if coarsest.offset_alignment_nbytes > _LARGEST_ALIGNMENT_NBYTES:
            raise SwapPathError(
                f"this drive's blocks are {coarsest.offset_alignment_nbytes} bytes",
                path=coarsest.folder,
                fix=f"use a drive with blocks of at most {_LARGEST_ALIGNMENT_NBYTES} bytes, or "
                'set "nvmeswap": {"direct": "off"}',
            )
        self.uses_gds = aio.use_gds and self._may_use_gds(swap) and _gds_works(folders)
        threads = aio.intra_op_parallelism
        self.engine = Engine(
            backend="gds" if self.uses_gds else self.probe.backend,
            block_nbytes=aio.block_size,
            background_nbytes=BACKGROUND_NBYTES * len(folders),
            queue_depth=aio.queue_depth,
            thread_count=max(threads, GDS_THREAD_COUNT) if self.uses_gds else threads,
        )
        self.store = Store(
            folders[0],
            run=placement.run,
            rank=placement.rank,
            world_size=placement.world_size,
            engine=self.engine,
            probe=self.probe,
            checksum=Checksum[swap.checksum.upper()],
            ephemeral=swap.ephemeral,
            timeout_s=swap.timeout_s,
        )

    def _may_use_gds(self, swap: SwapBlock) -> bool:
        if swap.backend != "auto":
            raise SwapConfigError(
                f'"use_gds" and "backend": "{swap.backend}" can\'t both be had',
                fix='leave "backend" out: use_gds has a backend of its own',
            )
        if not self._moves_gpu_tensors:
            warnings.warn('"use_gds" has no effect here: it is for what TensorSwapper moves',
                          RuntimeWarning, stacklevel=5)
        return self._moves_gpu_tensors

    def _open_memory(self, requests: Mapping[str, PoolRequest], pin_memory: bool) -> None:
        total_nbytes = sum(request.nbytes for request in requests.values())
        if total_nbytes:
            self.arena = Arena(total_nbytes, pin_memory=pin_memory)
            if self.engine is not None and pin_memory:  # registering locks the pages too
                self.engine.register_memory(self.arena.memory)
        begin = 0
        for name, request in requests.items():
            if not request.nbytes:
                self.pools[name] = None
                continue
            assert self.arena is not None
            memory = self.arena.memory[begin : begin + request.nbytes]
            self.pools[name] = Pool(memory, request.classes, name=name)
            begin += request.nbytes

    def close(self) -> None:
        """Wait for transfers in flight, remove the folder, give the memory back. Idempotent.

        The engine goes before the arena: it holds the arena's pages, and closing it lets go.
        """
        store, self.store = self.store, None
        engine, self.engine = self.engine, None
        arena, self.arena = self.arena, None
        try:
            if store is not None:
                store.close()
        finally:
            if engine is not None:
                engine.close(self.timeout_s)
            if arena is not None:
                arena.close()


def _gds_works(folders: Sequence[Path]) -> bool:
    for folder in folders:
        reason = probe_gds(folder).reason
        if reason is not None:
            warnings.warn(f'"use_gds" has no effect, since GPUDirect Storage does not work in '
                          f"{folder}: {reason}", RuntimeWarning, stacklevel=5)
            return False
    return True


def fit(
    pools: Mapping[str, PoolRequest], budget_nbytes: int | None, *, pin_memory: bool
) -> dict[str, PoolRequest]:
    """The requests, shrunk. Raises SwapBudgetError when even one slot a class is too much for the
    budget or the machine."""
    fitted = shrink(pools, budget_nbytes)
    preflight(
        wanted_nbytes=sum(request.nbytes for request in fitted.values()),
        smallest_nbytes=sum(request.smallest.nbytes for request in pools.values()),
        budget_nbytes=budget_nbytes,
        pin_memory=pin_memory,
        what="swap buffers (" + ", ".join(pools) + ")",
    )
    return fitted


def shrink(
    pools: Mapping[str, PoolRequest], budget_nbytes: int | None
) -> dict[str, PoolRequest]:
    """The requests, with slots taken away one by one (from whichever class takes most) until they
    fit the budget, or no slot can be spared. Arithmetic only."""
    fitted = {name: list(request.classes) for name, request in pools.items()}

    def total() -> int:
        return sum(Pool.nbytes_needed(classes) for classes in fitted.values())

    while budget_nbytes is not None and total() > budget_nbytes:
        candidates = [
            (pools[name].is_spare(each), each.nbytes * each.count, name, index)
            for name, classes in fitted.items()
            for index, each in enumerate(classes)
            if pools[name].shrinks and each.count > pools[name].least_count
        ]
        if not candidates:
            break
        *_, name, index = max(candidates)
        each = fitted[name][index]
        fitted[name][index] = SlotClass(each.nbytes, each.count - 1)
    return {name: replace(pools[name], classes=classes) for name, classes in fitted.items()}


def new_run_name() -> str:
    """A name that nobody else on this machine has: start time, process id and a running number."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_run_numbers)}"
