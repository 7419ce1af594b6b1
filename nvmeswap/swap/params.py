"""Parameter shards: on NVMe between uses, in host memory around them.

A shard is read ahead of its use by the plan of the last step, copied out at its use, and either
kept (`max_in_cpu`) or dropped. Reading ahead takes free slots only. A use that finds no free slot
evicts the clean shard that is needed last, so that it never waits behind what was read ahead for
others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from nvmeswap.errors import SwapIOError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.memory.pool import Pool
from nvmeswap.memory.slot import Slot
from nvmeswap.stats import ParamStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store, StoreRequest
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.plan import Plan
from nvmeswap.swap.shard import ParamShard, ShardSpec, ShardState

PARAMS_FILE = "params.swp"
# Elements written at a time; where they are converted, two such pieces are in memory besides.
_PIECE_NUMEL = 1 << 22


class PartitionedParamSwapper:
    """Parameter shards by key: written once, fetched at each use, updated by the optimizer.

        swapper = PartitionedParamSwapper(specs, placement, store=store, pool=pool, timeout_s=60)
        swapper.write(key, values)
        swapper.fetch(key, out)          # at each use, in any order
        swapper.update(key, 0, values)   # by the optimizer
        swapper.end_step()               # from here on reads run ahead of the uses

    Args: `specs` in order of first use; `store` and `pool` may be None when nothing is swapped;
    `ahead`, the lane of reads that run ahead: DEMAND where nothing else asks for the drive.
    Raises: SwapReadError and its kin when a shard can't be read, SwapPoolTimeoutError when no slot
    comes free in `timeout_s`.
    Blocking: `fetch`, `read` and `write` wait for the disk; `read_part` and `update` do not.
    Threads: safe; one lock, held while a demanded read is waited for.
    Ownership: the pool's slots are this object's; store and pool are closed by their owner.
    """

    def __init__(
        self,
        specs: Sequence[ShardSpec],
        placement: ParamPlacement,
        *,
        store: Store | None,
        pool: Pool | None,
        timeout_s: float,
        ahead: Lane = Lane.PREFETCH,
    ) -> None:
        self._placement = placement
        self._store = store
        self._pool = pool
        self._timeout_s = timeout_s
        self._ahead = ahead
        self._lock = threading.RLock()
        self._plan = Plan()
        self._kept: dict[str, ParamShard] = {}
        self._kept_numel = 0
        self._shards = {spec.key: ParamShard(spec, self._ram_for(spec)) for spec in specs}
        self._fetch_count = self._hit_count = self._prefetch_count = 0
        self._stall_s = 0.0
        self._lent: ParamShard | None = None
        self._slot_count = 0 if pool is None else pool.stats().slot_count
        self.step_count = 0
        on_nvme = [spec for spec in specs if placement.swaps(spec)]
        swapped = {spec.key: TensorSpec(spec.dtype, (spec.numel,), (1,)) for spec in on_nvme}
        # Those on NVMe that slots could have, and none has. (A hint: what counts are their states.)
        self._away = {key for key in swapped if not placement.streams(self._shards[key].spec)}
        if swapped:
            assert store is not None
            store.create_file(PARAMS_FILE, swapped)

    def _ram_for(self, spec: ShardSpec) -> torch.Tensor | None:
        if self._placement.swaps(spec):
            return None
        if spec.numel == 0 or self._placement.on_nvme:
            return torch.empty(spec.numel, dtype=spec.dtype, device="cpu")
        assert self._pool is not None
        slot = self._pool.acquire(spec.nbytes, holder=spec.key, timeout_s=0)
        return slot.memory[: spec.nbytes].view(spec.dtype)

    # --- values in and out --------------------------------------------------------------------

    def fetch(self, key: str, out: torch.Tensor) -> None:
        """Copy a shard into `out` (flat, the shard's dtype, any device): a use, noted in the plan.

        On a CUDA device the copy is queued on the current stream, and the slot is held until that
        copy is done. Afterwards reads for the next uses are started.
        """
        with self._lock:
            shard = self._begin_use(key)
            self._copy_out(shard, out)
            self._end_use(shard)

    def lend(self, key: str) -> torch.Tensor:
        """As `fetch`, but the shard itself, flat, in host memory, and nothing is copied. It is
        valid until the next `fetch`, `lend` or `end_step`, and not to be written to."""
        with self._lock:
            shard = self._begin_use(key)
            if shard.ram is not None:
                self._hit_count += 1
                values = shard.ram
            elif self._placement.streams(shard.spec):
                values = torch.empty(shard.spec.numel, dtype=shard.spec.dtype, device="cpu")
                self._stream(shard, values)
            else:
                self._bring(shard)
                self._lent = shard
                values = shard.values
            self._read_ahead()
            return values

    def next_uses(self) -> Iterator[str]:
        """The shards that the rest of this step uses, by the plan, in order."""
        return self._plan.rest()

    def copy_ahead(self, key: str, out: torch.Tensor) -> int | None:
        """Copy a shard as `fetch` does, before its use: returns what `use_copy` is to be told, or
        None where that would wait for the disk. Does not block."""
        with self._lock:
            shard = self._shard(key)
            if not self.is_ready(key):
                return None
            if shard.ram is None and shard.state is ShardState.READING:
                try:
                    self._finish_reading(shard)
                except SwapIOError:
                    return None  # the use itself reads again, and raises
            shard.copy_to(out, shard.values if shard.ram is None else shard.ram)
            return shard.version

    def use_copy(self, key: str, version: int) -> bool:
        """A use of a shard that was copied ahead; False, and no use is noted, if it has changed
        since. Afterwards reads for the next uses are started."""
        with self._lock:
            if self._shard(key).version != version:
                return False
            shard = self._begin_use(key)
            self._hit_count += 1
            self._end_use(shard)
            return True

    def is_ready(self, key: str) -> bool:
        """True if `fetch` would not wait for the disk now. Does not block."""
        with self._lock:
            shard = self._shard(key)
            if shard.ram is not None or shard.state is ShardState.CLEAN:
                return True
            return shard.state is ShardState.READING and shard.has_been_read

    def expect(self, keys: Sequence[str]) -> None:
        """These are the next uses, whatever was recorded; starts to read ahead."""
        with self._lock:
            self._plan.expect(keys)
            self._read_ahead()

    def __contains__(self, key: str) -> bool:
        return key in self._shards

    def _begin_use(self, key: str) -> ParamShard:
        shard = self._shard(key)
        self._plan.use(key)
        self._fetch_count += 1
        self._take_back()
        return shard

    def _end_use(self, shard: ParamShard) -> None:
        if shard.state is ShardState.CLEAN:
            self._keep(shard)
        self._read_ahead()

    def _take_back(self) -> None:
        """Whoever it was lent to has used it."""
        shard, self._lent = self._lent, None
        if shard is not None and shard.state is ShardState.CLEAN:
            self._keep(shard)

    def read(self, key: str, out: torch.Tensor) -> None:
        """Copy a shard into `out`, outside the plan (checkpoints, inspection)."""
        with self._lock:
            shard = self._shard(key)
            known = shard.state
            self._copy_out(shard, out)
            if known is ShardState.ON_NVME and shard.state is ShardState.CLEAN:
                self._evict(shard)

    def read_part(
        self, key: str, start: int, out: torch.Tensor, lane: Lane
    ) -> list[StoreRequest]:
        """Fill `out` (flat, host, the shard's dtype) with the elements from `start` on, outside the
        plan and without a slot.

        From a copy in host memory at once; from NVMe the read is under way on return, and `out` is
        to be left alone until the returned requests are done.
        """
        with self._lock:
            shard = self._shard(key)
            _same_numel(shard.spec, out.numel(), start)
            assert out.dtype is shard.spec.dtype and out.device.type == "cpu"
            if shard.state is ShardState.READING and shard.has_been_read:
                with contextlib.suppress(SwapIOError):  # what was read ahead in vain is read below
                    self._finish_reading(shard)
            copy = shard.ram
            if shard.state is ShardState.CLEAN:
                copy = shard.values
            if copy is not None:
                out.copy_(copy[start : start + out.numel()])
                return []
            assert self._store is not None
            return [self._store.read(key, out, lane=lane, first_byte=start * out.itemsize)]

    def write(self, key: str, values: torch.Tensor) -> None:
        """Replace a whole shard by `values` (flat, any dtype and device), a piece at a time; waits
        for the disk. Where there is room for it, it stays in memory, as after a use; after a failed
        write it does not, and it can't be read before another."""
        with self._lock:
            shard = self._shard(key)
            _same_numel(shard.spec, values.numel(), 0)
            assert values.shape == (shard.spec.numel,), f"{shard.spec} from {values.shape}"
            if shard.state is ShardState.READING:
                with contextlib.suppress(SwapIOError):
                    self._finish_reading(shard)
            if shard.state is ShardState.CLEAN:
                self._evict(shard)
            if shard.ram is None and shard.spec.numel > _PIECE_NUMEL:
                assert self._store is not None
                self._store.forget_bytes(key)  # or Ctrl-C would leave it old and new
            slot = self._slot_to_stay(shard)  # after Ctrl-C it is nobody's: an orphan of the pool
            try:
                self._write(shard, values.detach(), slot)
            except BaseException:
                if slot is not None:
                    slot.release()
                raise
            if slot is not None:
                shard.slot = slot
                shard.move(ShardState.CLEAN)
                self._away.discard(key)
                self._keep(shard)

    def _write(self, shard: ParamShard, values: torch.Tensor, slot: Slot | None) -> None:
        """To where the shard lives, and to `slot`, which is nobody's yet."""
        dtype = shard.spec.dtype
        pending: list[StoreRequest] = []
        for start in range(0, shard.spec.numel, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, shard.spec.numel)
            host = values[start:stop].to(device="cpu", dtype=dtype).contiguous()
            if slot is not None:
                slot.memory[: shard.spec.nbytes].view(dtype)[start:stop].copy_(host)
            pending, before = self.update(shard.key, start, host), pending
            for request in before:
                request.wait(self._timeout_s)
        for request in pending:
            request.wait(self._timeout_s)

    def update(self, key: str, start: int, values: torch.Tensor) -> list[StoreRequest]:
        """Replace the elements from `start` on by `values` (flat, host, the shard's dtype).

        A copy in host memory is replaced at once; for NVMe the write is under way on return, and
        `values` must stay unchanged until the returned requests are done.
        """
        with self._lock:
            shard = self._shard(key)
            _same_numel(shard.spec, values.numel(), start)
            assert values.dtype is shard.spec.dtype and values.device.type == "cpu"
            if values.numel() == 0:
                return []
            shard.version += 1
            stop = start + values.numel()
            if shard.ram is not None:
                shard.wait_for_copies()
                shard.ram[start:stop].copy_(values)
                return []
            if shard.state is ShardState.READING:
                with contextlib.suppress(SwapIOError):  # what was read ahead is of no use now
                    self._finish_reading(shard)
            if shard.state is ShardState.CLEAN:
                shard.wait_for_copies()
                shard.values[start:stop].copy_(values)
            assert self._store is not None
            first_byte = start * values.itemsize
            return [self._store.write(key, values, lane=Lane.WRITEBACK, first_byte=first_byte)]

    def end_step(self) -> None:
        """The optimizer step is over: what was recorded since the last call becomes the plan."""
        with self._lock:
            self._take_back()
            self._plan.end_step()
            self.step_count += 1

    def stats(self) -> ParamStats:
        """Counters since the start."""
        with self._lock:
            shards = self._shards.values()
            return ParamStats(
                nvme_nbytes=sum(s.spec.nbytes for s in shards if s.ram is None),
                ram_nbytes=sum(s.spec.nbytes for s in shards if s.ram is not None),
                cached_nbytes=sum(s.spec.nbytes for s in shards if s.state is ShardState.CLEAN),
                held_slot_count=sum(s.slot is not None for s in shards),
                fetch_count=self._fetch_count,
                hit_count=self._hit_count,
                prefetch_count=self._prefetch_count,
                stall_s=self._stall_s,
            )

    def spec(self, key: str) -> ShardSpec:
        """The shard's description; SwapUsageError for an unknown key."""
        return self._shard(key).spec

    # --- how ----------------------------------------------------------------------------------

    def _shard(self, key: str) -> ParamShard:
        try:
            return self._shards[key]
        except KeyError:
            raise SwapUsageError(f"no parameter shard is called {key!r}") from None

    def _copy_out(self, shard: ParamShard, out: torch.Tensor) -> None:
        spec = shard.spec
        assert out.dtype is spec.dtype and out.shape == (spec.numel,), f"{spec} into {out.shape}"
        if shard.ram is not None:
            shard.copy_to(out, shard.ram)
            self._hit_count += 1
            return
        if self._placement.streams(spec):
            self._stream(shard, out)
            return
        self._bring(shard)
        shard.copy_to(out, shard.values)

    def _bring(self, shard: ParamShard) -> None:
        """Have it in a slot, CLEAN; waits for the disk."""
        began = time.perf_counter()
        if shard.state is ShardState.ON_NVME:
            slot = shard.slot or self._slot_for_demand(shard.spec)
            self._start_reading(shard, slot, Lane.DEMAND)
        elif shard.state is ShardState.CLEAN or shard.has_been_read:
            self._hit_count += 1
        if shard.state is ShardState.READING:
            self._finish_reading(shard)
        self._stall_s += time.perf_counter() - began

    def _stream(self, shard: ParamShard, out: torch.Tensor) -> None:
        """A shard larger than every slot: the engine moves it block by block through its own."""
        assert self._store is not None
        began = time.perf_counter()
        host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        self._store.read(shard.key, host, lane=Lane.DEMAND).wait(self._timeout_s)
        if host is not out:
            out.copy_(host)
        self._stall_s += time.perf_counter() - began

    def _start_reading(self, shard: ParamShard, slot: Slot, lane: Lane) -> None:
        store = self._store
        assert store is not None
        memory = slot.memory[: shard.spec.nbytes]
        shard.start_reading(slot, lambda: [store.read(shard.key, memory, lane=lane)])
        self._away.discard(shard.key)

    def _slot_for_demand(self, spec: ShardSpec) -> Slot:
        """A slot now: free, or taken from the resident of this size that is needed last."""
        assert self._pool is not None
        while (slot := self._pool.try_acquire(spec.nbytes, holder=spec.key)) is None:
            same_class = [
                shard
                for shard in self._shards.values()
                if shard.slot is not None
                and shard.slot.nbytes == self._pool.class_nbytes(spec.nbytes)
            ]
            if not same_class:
                self._pool.release_orphans(
                    [shard.slot for shard in self._shards.values() if shard.slot is not None]
                )
                return self._pool.acquire(spec.nbytes, holder=spec.key, timeout_s=self._timeout_s)
            victim = max(same_class, key=lambda shard: self._plan.next_use(shard.key))
            if victim.state is ShardState.ON_NVME:  # its read was interrupted
                assert victim.slot is not None
                self._start_reading(victim, victim.slot, Lane.DEMAND)
            if victim.state is ShardState.READING:
                try:
                    self._finish_reading(victim)
                except SwapIOError:
                    continue  # its slot is free now; the error is for whoever needs that shard
            self._evict(victim)
        return slot

    def _read_ahead(self) -> None:
        """Start reads for the next uses, as far as free slots go."""
        if self._pool is None or not self._away:
            return
        for key in islice(self._plan.upcoming(), 2 * self._slot_count):
            if key not in self._away:
                continue
            shard = self._shards[key]
            if shard.state is not ShardState.ON_NVME:  # Ctrl-C came before that was noted
                self._away.discard(key)
                continue
            slot = shard.slot or self._pool.try_acquire(shard.spec.nbytes, holder=key)
            if slot is None:
                continue
            self._start_reading(shard, slot, self._ahead)
            self._prefetch_count += 1

    def _finish_reading(self, shard: ParamShard) -> None:
        try:
            shard.finish_reading()
        finally:
            if shard.state is ShardState.ON_NVME:
                self._away.add(shard.key)

    def _slot_to_stay(self, shard: ParamShard) -> Slot | None:
        """For one that is written whole, where nobody has to give up a slot for it."""
        would_fit = self._kept_numel + shard.spec.numel <= self._placement.max_in_cpu
        if self._pool is None or not would_fit or shard.key not in self._away or shard.slot:
            return None
        return self._pool.try_acquire(shard.spec.nbytes, holder=shard.key)

    def _keep(self, shard: ParamShard) -> None:
        """Keep it after its use if `max_in_cpu` allows; over that, those needed last go first."""
        if shard.key not in self._kept:
            self._kept[shard.key] = shard
            self._kept_numel += shard.spec.numel
        while self._kept_numel > self._placement.max_in_cpu:
            self._evict(max(self._kept.values(), key=lambda kept: self._plan.next_use(kept.key)))

    def _evict(self, shard: ParamShard) -> None:
        if self._kept.pop(shard.key, None) is not None:
            self._kept_numel -= shard.spec.numel
        self._away.add(shard.key)
        shard.drop_slot()


def _same_numel(spec: ShardSpec, numel: int, start: int) -> None:
    if start + numel > spec.numel:
        raise SwapUsageError(
            f"{spec.key} has {spec.numel} elements; {numel} from element {start} on don't fit"
        )
