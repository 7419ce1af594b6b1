"""What `shard()` leaves behind: the swap space of one rank and everything in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nvmeswap.errors import SwapError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.io.probe import Drive
from nvmeswap.stats import (
    EngineStats,
    OptimizerStats,
    ParamStats,
    PlacementStats,
    PoolStats,
    StoreStats,
)
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.space import SwapSpace
from nvmeswap.swap.states import Source
from nvmeswap.swap.sub_group import MASTER
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.ahead import DeviceAhead, budget_nbytes
from nvmeswap.zero3.entries import Entry
from nvmeswap.zero3.home import ShardedHome
from nvmeswap.zero3.optimizer import ShardedOptimizer
from nvmeswap.zero3.placement import placement_of
from nvmeswap.zero3.tensor import ShardHandle, SwappedTensor, register_source


@dataclass(frozen=True, slots=True)
class SwapStats:
    """All counters of one rank; None where nothing of the kind is swapped. `drives`: the folders
    that the bytes are spread over, each with its measured bandwidth and its share. `pools`: the
    slots of host memory, by what they are for."""

    engine: EngineStats | None
    store: StoreStats | None
    params: ParamStats | None
    optimizer: OptimizerStats | None
    placement: PlacementStats
    arena_nbytes: int
    locked_nbytes: int
    drives: tuple[Drive, ...]
    pools: Mapping[str, PoolStats]


class ZeroSwap:
    """`optimizer.swap`: the bytes of a model's swapped shards (a `ShardSource`), and their
    counters.

    Threads: FSDP2 asks for shards from the thread that runs forward or backward; all else from the
    training loop's.
    """

    def __init__(
        self,
        *,
        space: SwapSpace,
        params: PartitionedParamSwapper | None,
        optimizer: ShardedOptimizer,
        home: ShardedHome,
        agreement: Agreement,
    ) -> None:
        self._space = space
        self._params = params
        # The optimizer holds this object; a cycle would keep the arena until the next collection.
        self._optimizer = weakref.proxy(optimizer)
        self._home = home
        self._agreement = agreement
        self._entries: dict[str, Entry] = {}
        self._ahead: DeviceAhead | None = None
        self._number = register_source(self)

    def take_over(self, entry: Entry) -> None:
        """Free a shard that has been written, and put a SwappedTensor in its place."""
        handle = ShardHandle(self._number, entry.key)
        dtype, device = entry.parameter.dtype, _device_of(entry)
        local = SwappedTensor(handle, shape=entry.shape, dtype=dtype, device=device)
        padded = SwappedTensor(
            handle, shape=(entry.padded_shape.numel(),), dtype=dtype, device=device
        )
        entry.local = None
        fsdp.replace_local_tensor(entry.record, local, padded)
        self._entries[entry.key] = entry

    # --- ShardSource --------------------------------------------------------------------------

    def gather_input(self, key: str) -> torch.Tensor:
        """Called by FSDP2 before an all-gather; a failed read gives NaN here and an error on all
        ranks at the next `optimizer.step()`, or at once if there is one rank."""
        entry = self._entry(key)
        self._home.gather_order.note(key, fsdp.shard_group(entry.record))
        self._home.gathers_what_was_updated(key)
        dtype = self._shards.spec(key).dtype
        try:
            if entry.gathers_itself and dtype is entry.compute_dtype:
                return self._shards.lend(key).view(entry.padded_shape)
            flat = self._fetch(entry, dtype)
        except SwapError as error:
            if self._agreement.alone:
                raise
            self._agreement.report(error)
            lost = float("nan") if dtype.is_floating_point else 0
            flat = torch.full((entry.padded_shape.numel(),), lost, dtype=dtype, device="cpu")
            flat = flat.to(_device_of(entry))
        return flat.to(entry.compute_dtype).view(entry.padded_shape)

    def _fetch(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        ahead = self._ahead
        flat = None if ahead is None else ahead.take(entry.key)
        if flat is None:
            flat = torch.empty(entry.padded_shape.numel(), dtype=dtype, device=_device_of(entry))
            self._shards.fetch(entry.key, flat[: entry.numel])
        if ahead is not None:
            ahead.look_ahead()
        return flat

    def copy_ahead(self, groups: Sequence[Sequence[Entry]]) -> None:
        """Where this rank has whole parameters and computes on a GPU, from now on what is needed
        next is copied there meanwhile, and when a step is over what the next pass begins with: at
        most twice what is swapped of the largest of `groups`."""
        swapped = [[entry for entry in group if entry.swapped] for group in groups]
        entries = [entry for group in swapped for entry in group]
        if entries and all(each.is_whole and _device_of(each).type == "cuda" for each in entries):
            most_nbytes = budget_nbytes([each.spec for each in group] for group in swapped)
            ahead = DeviceAhead(self._shards, _device_of(entries[0]), most_nbytes)
            self._ahead, self._home.before_pass = ahead, ahead.look_ahead
            ahead.look_ahead()

    def read_shard(self, key: str) -> torch.Tensor:
        """The fp32 master where there is one (what a resident parameter would hold), else the
        stored values; waits for the disk."""
        entry = self._entry(key)
        dtype, device = entry.parameter.dtype, _device_of(entry)
        if self._optimizer.swapper.item(key) is not None:
            self._optimizer.flush()
            flat: torch.Tensor = self._optimizer.states.read(key, MASTER)
        else:
            flat = torch.empty(entry.numel, dtype=self._shards.spec(key).dtype, device="cpu")
            self._shards.read(key, flat)
        return flat.to(device=device, dtype=dtype).view(entry.shape)

    def write_shard(self, key: str, values: torch.Tensor) -> None:
        """Replace the master and with it the stored values, or those alone where there is none;
        waits for the disk. Between passes, gathered copies are dropped."""
        self._entry(key)
        flat = values.detach().reshape(-1)
        if self._optimizer.swapper.item(key) is not None:
            self._optimizer.states.write({key: {MASTER: Source.of(flat)}})
        else:
            self._shards.write(key, flat)
        if not fsdp.in_backward():
            self._home.drop_gathered()

    def stored_dtype(self, key: str) -> torch.dtype:
        """Of what `read_part` gives."""
        return self._shards.spec(key).dtype

    def read_part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Stored values [start, stop) of a shard, flat, on the host; waits for the disk."""
        out = torch.empty(stop - start, dtype=self._shards.spec(key).dtype, device="cpu")
        for request in self._shards.read_part(key, start, out, Lane.PREFETCH):
            request.wait(self._space.timeout_s)
        return out

    def write_part(self, key: str, start: int, values: torch.Tensor) -> None:
        """Replace stored values of a shard that has no master, from `start` on; waits for the
        disk."""
        stored = values.to("cpu", self._shards.spec(key).dtype).contiguous()
        for request in self._shards.update(key, start, stored):
            request.wait(self._space.timeout_s)

    # --- for users ----------------------------------------------------------------------------

    def stats(self) -> SwapStats:
        """All counters of this rank since the start."""
        space, swapper = self._space, self._optimizer.swapper
        gradients_nbytes = self._home.gradients.nbytes
        return SwapStats(
            engine=None if space.engine is None else space.engine.stats(),
            store=None if space.store is None else space.store.stats(),
            params=None if self._params is None else self._params.stats(),
            optimizer=swapper.stats(gradients_nbytes),
            placement=placement_of(
                self._home.entries, self._params, swapper, gradients_nbytes
            ),
            arena_nbytes=0 if space.arena is None else space.arena.nbytes,
            locked_nbytes=0 if space.arena is None else space.arena.locked_nbytes,
            drives=() if space.probe is None else space.probe.drives,
            pools={name: pool.stats() for name, pool in space.pools.items() if pool is not None},
        )

    @property
    def spare_nbytes(self) -> int | None:
        """What is left of the user's budget of host memory; None without one."""
        budget_nbytes, arena = self._space.budget_nbytes, self._space.arena
        taken_nbytes = 0 if arena is None else arena.nbytes
        return None if budget_nbytes is None else max(0, budget_nbytes - taken_nbytes)

    def close(self) -> None:
        """Remove the swap files and give the memory back. The model's swapped parameters can't be
        used after it. Idempotent."""
        self._home.gradients.clear()
        if self._ahead is not None:
            self._ahead.close()
        self._space.close()

    @property
    def _shards(self) -> PartitionedParamSwapper:
        assert self._params is not None
        return self._params

    def _entry(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise SwapUsageError(f"{key} is not swapped")
        return entry


def _device_of(entry: Entry) -> torch.device:
    device: torch.device = entry.record.device
    return device
