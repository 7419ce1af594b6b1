"""`TensorSwapper`: any tensor to NVMe and back, by name. The standalone door."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch

from nvmeswap.config import AioConfig, SwapBlock, check_folders
from nvmeswap.errors import SwapError, SwapTimeoutError, SwapUsageError, SwapWriteError
from nvmeswap.io.engine import Lane
from nvmeswap.stats import StoreStats
from nvmeswap.store.request import raise_first
from nvmeswap.store.store import Store, StoreBatch
from nvmeswap.swap.layout import (
    NOWHERE,
    StoredTensor,
    check_out,
    fit,
    flat,
    host_for,
    on_host,
    outline,
    ties_of,
)
from nvmeswap.swap.reading import Reading, TensorFuture
from nvmeswap.swap.space import Placement, SwapSpace, new_run_name
from nvmeswap.swap.staging import Staging, by_device, is_staged, is_staged_on
from nvmeswap.swap.transit import Transit

TENSORS_FILE = "tensors.swp"
_BLOCK_COUNT = 1024
_device_of, _is_cpu = map(attrgetter, ("device", "is_cpu"))
_Element = TypeVar("_Element")


class TensorSwapper:
    """Tensors on NVMe by name: each comes back with its dtype, shape, stride and device.

        with TensorSwapper("/mnt/nvme") as swapper:
            swapper.swap_out("weight", weight)
            weight = swapper.swap_in("weight")
            swapper.swap_out_many(moments)               # a dict, at the speed of the disk
            swapper.swap_in_many(moments, out=moments)

    Args: `nvme_path`, an existing folder, or one on each of several drives; `swap` and `aio`, as in
    the JSON; `reserve_nbytes`, space to take now and fill with zeros, so that the first tensors
    there are written as fast as later ones (each takes whole pages; `stats()` tell the cost).
    Raises: SwapPathError and SwapSpaceError on construction; SwapSpaceError and SwapWriteError on
    swap_out, with the tensor in memory intact; SwapReadError, SwapChecksumError, SwapManifestError
    on swap_in.
    Blocking: all but the forms called `_async` and `prefetch`. Threads: one at a time.
    On a GPU: in the order of the current stream, as any operation on the tensors is. They pass
    through a few slots, taken at the first of them (`staging.py`); the forms called `_async` and
    `prefetch` take page-locked memory for the whole tensor.
    Ownership: tensors are the caller's. The files are scratch: `close` removes them.
    Not for state that must outlive the process: that is a checkpoint.
    """

    def __init__(
        self,
        nvme_path: str | Path | Sequence[str | Path],
        *,
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
        reserve_nbytes: int = 0,
    ) -> None:
        folders = check_folders(nvme_path, key="nvme_path")
        self._space = SwapSpace(
            Placement(folders, new_run_name()),
            {},
            swap=swap or SwapBlock(),
            aio=aio or AioConfig(),
            pin_memory=False,
            moves_gpu_tensors=True,
        )
        if reserve_nbytes:
            try:
                self._store.reserve(TENSORS_FILE, reserve_nbytes)
            except BaseException:
                self._space.close()
                raise
        self._staging = Staging(self._space)
        self._stored: dict[str, StoredTensor] = {}
        self._names: set[str] = set()  # of all of them
        self._prefetched: dict[str, TensorFuture] = {}
        self._numbers = itertools.count()

    # --- out ----------------------------------------------------------------------------------

    def swap_out(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor under a key, replacing what was there."""
        if is_staged_on(tensor.device):
            self.swap_out_many({key: tensor})
        else:
            self.swap_out_async(key, tensor).wait()

    def swap_out_async(self, key: str, tensor: torch.Tensor) -> TensorFuture:
        """The same, not waited for. On the CPU the tensor itself is the source: leave it unchanged
        until the future is done."""
        batch = self._start_writing([key], [tensor])
        return TensorFuture(next(iter(batch.requests), None), 0, tensor, tensor)

    def swap_out_many(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write several tensors at once; those that are the same memory are stored once. If some
        can't be written the others are, and the error names those."""
        order = self._file_order(tensors)
        sources = [tensors[key] for key in order]
        ties = ties_of(order, sources)
        if ties:
            order = [key for key in order if key not in ties]
            sources = [tensors[key] for key in order]
        staged = by_device(order, sources)
        if staged:
            apart = set().union(*staged.values())
            order = [key for key in order if key not in apart]
            sources = [tensors[key] for key in order]
        started: list[tuple[list[str], StoreBatch]] = []
        failures: dict[str, SwapError] = {}
        try:
            for keys, block in zip(_blocks(order), _blocks(sources), strict=True):
                try:
                    started.append((keys, self._start_writing(keys, block)))
                except SwapWriteError as error:  # no space for these; perhaps for others
                    failures |= dict.fromkeys(keys, error)
            for device, group in staged.items():
                failures |= self._write_staged(device, group)
        finally:
            for keys, batch in started:
                failures |= {keys[index]: error for index, error in batch.failed().items()}
        for key, owner in ties.items():
            if owner in failures:
                failures[key] = failures[owner]
            else:
                self._tie(key, owner)
        if failures:
            raise_first([(key, failures[key]) for key in tensors if key in failures])

    def _start_writing(self, keys: list[str], tensors: list[torch.Tensor]) -> StoreBatch:
        """From host memory: each to where it was, if the tensor is like the one before it; else to
        a new place."""
        self._forget_prefetched(keys)
        stored = [self._stored.get(key) for key in keys]
        fits = fit(stored, tensors)
        if not all(map(_is_cpu, tensors)):
            fits = [fits[index] and each.is_cpu for index, each in enumerate(tensors)]
        memories = tensors
        if not all(fits):
            others = [index for index, each in enumerate(fits) if not each]
            hosts = [on_host(keys[index], tensors[index], pin_memory=True) for index in others]
            memories = list(tensors)
            for index, host in zip(others, hosts, strict=True):
                memories[index] = flat(host)
            self._make_room(stored, keys, tensors, dict(zip(others, hosts, strict=True)))
        names = [each.name for each in stored if each]
        return self._store.write_many(names, memories, lane=Lane.DEMAND)

    def _write_staged(
        self, device: torch.device, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, SwapError]:
        """From one GPU, by way of slots; returns what went wrong, by key."""
        no_space: dict[str, SwapError] = {}

        def transits() -> Iterator[Transit]:
            for items in _blocks(list(tensors.items())):
                keys, block = map(list, zip(*items, strict=True))
                self._forget_prefetched(keys)
                stored = [self._stored.get(key) for key in keys]
                fits = fit(stored, block)
                outlines = {i: outline(block[i]) for i, each in enumerate(fits) if not each}
                try:
                    self._make_room(stored, keys, block, outlines, is_staged=True)
                except SwapWriteError as error:
                    no_space.update(dict.fromkeys(keys, error))
                    continue
                for key, each, tensor in zip(keys, stored, block, strict=True):
                    assert each is not None
                    yield Transit(key, each.name, each.spec, tensor)

        return self._staging.write(device, transits()) | no_space

    def _make_room(
        self,
        stored: list[StoredTensor | None],
        keys: list[str],
        tensors: list[torch.Tensor],
        denses: Mapping[int, torch.Tensor],
        *,
        is_staged: bool = False,
    ) -> None:
        """Replaces those of `stored` that `denses` has, which are to be what is stored."""
        fresh: dict[str, StoredTensor] = {}
        try:
            for index, dense in denses.items():
                stored[index] = self._place(
                    keys[index], dense, tensors[index].device, fresh, is_staged=is_staged
                )
            specs = {name: each.spec for name, each in fresh.items()}
            offsets = self._store.allocate_many(TENSORS_FILE, specs)
        except BaseException:
            for key in {keys[index] for index in denses} & self._stored.keys():
                if self._stored[key].name in fresh:
                    del self._stored[key]
            self._names -= fresh.keys()
            self._store.free_those_of(fresh)  # Ctrl-C may have come after they were allocated
            raise
        for each, offset_bytes in zip(fresh.values(), offsets, strict=True):
            each.offset_bytes = offset_bytes

    # --- in -----------------------------------------------------------------------------------

    def swap_in(self, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor: into `out` (same dtype and shape, any stride and device), or a new one."""
        device = out.device if out is not None else self._known(key).device
        if is_staged_on(device):
            return self.swap_in_many([key], None if out is None else {key: out})[key]
        return self.swap_in_async(key, out).wait()

    def swap_in_async(self, key: str, out: torch.Tensor | None = None) -> TensorFuture:
        """The same, not waited for; `out` is complete when the future was waited for."""
        ready = self._prefetched.get(key)
        if ready is not None:
            if out is not None:
                check_out(key, self._stored[key].spec, out)
                ready = ready.into(out)
            del self._prefetched[key]
            return ready
        return self._start_reading([key], [out], Lane.DEMAND).futures()[0]

    def swap_in_many(
        self, keys: Iterable[str], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Read several tensors at once: into those of `out`, or new ones where it has none. If some
        can't be read the others of `out` are good, and the error names those that can't."""
        given = out or {}
        asked = list(dict.fromkeys(keys))
        ready = {
            key: self.swap_in_async(key, given.get(key))
            for key in (asked if self._prefetched else ())
            if key in self._prefetched
        }
        tensors: dict[str, torch.Tensor] = {}
        failures: dict[str, SwapError] = {}
        started: list[tuple[list[str], Reading]] = []
        try:
            others = [key for key in asked if key not in ready] if ready else asked
            others = self._file_order(others)
            staged = self._read_through_slots(others, given)
            if staged:
                apart = set().union(*staged.values())
                others = [key for key in others if key not in apart]
            for block in _blocks(others):
                reading = self._start_reading(block, list(map(given.get, block)), Lane.DEMAND)
                started.append((block, reading))
            for device, group in staged.items():
                failures |= self._read_staged(device, group, given, tensors)
        finally:
            for block, reading in started:
                failed = reading.finish()
                failures |= {block[index]: error for index, error in failed.items()}
                tensors.update(zip(block, reading.outs, strict=True))
        for key, future in ready.items():
            try:
                tensors[key] = future.wait()
            except SwapTimeoutError:
                raise
            except SwapError as error:
                failures[key] = error
        if failures:
            raise_first([(key, failures[key]) for key in asked if key in failures])
        return {key: tensors[key] for key in asked}

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start reading tensors, all at once; the next `swap_in` of each takes what was read."""
        left = [key for key in dict.fromkeys(keys) if key not in self._prefetched]
        for block in _blocks(self._file_order(left)):
            reading = self._start_reading(block, [None] * len(block), Lane.PREFETCH)
            self._prefetched.update(zip(block, reading.futures(), strict=True))

    def _start_reading(
        self, keys: list[str], given: Sequence[torch.Tensor | None], lane: Lane
    ) -> Reading:
        stored = [self._stored.get(key) or self._known(key) for key in keys]
        outs = [
            each.new_tensor() if out is None else out
            for each, out in zip(stored, given, strict=True)
        ]
        hosts = memories = outs
        fits = fit(stored, outs)
        if not all(map(_is_cpu, outs)):
            fits = [fits[index] and each.is_cpu for index, each in enumerate(outs)]
        if not all(fits):
            hosts, memories = list(outs), list(outs)
            for index in [index for index, each in enumerate(fits) if not each]:
                check_out(keys[index], stored[index].spec, outs[index])
                hosts[index] = host_for(stored[index], outs[index])
                memories[index] = flat(hosts[index])
        batch = self._store.read_many([each.name for each in stored], memories, lane=lane)
        return Reading(batch, hosts, outs)

    def _read_through_slots(
        self, keys: list[str], given: Mapping[str, torch.Tensor]
    ) -> dict[torch.device, list[str]]:
        """Those that go through slots, by device. Not what was written as a whole and is larger
        than a slot: its parts have no checksums."""
        known = self._stored
        devices = {known[key].device for key in keys if key in known}
        devices.update(map(_device_of, given.values()))
        staged: dict[torch.device, list[str]] = {}
        if any(map(is_staged_on, devices)):
            for key in keys:
                stored, out = self._known(key), given.get(key)
                device = stored.device if out is None else out.device
                if not is_staged_on(device) or not (out is None or is_staged(out)):
                    continue
                if stored.is_in_parts or stored.spec.nbytes <= self._staging.slot_nbytes:
                    staged.setdefault(device, []).append(key)
        return staged

    def _read_staged(
        self, device: torch.device, keys: list[str], given: Mapping[str, torch.Tensor],
        tensors: dict[str, torch.Tensor],
    ) -> dict[str, SwapError]:
        """To one GPU, by way of slots: into `tensors`; returns what went wrong, by key."""

        def transits() -> Iterator[Transit]:
            for key in keys:
                stored, out = self._known(key), given.get(key)
                if out is None:
                    out = stored.new_tensor()
                else:
                    check_out(key, stored.spec, out)
                tensors[key] = out
                yield Transit(key, stored.name, stored.spec, out)

        return self._staging.read(device, transits())

    @contextlib.contextmanager
    def borrow(self, key: str, *, write_back: bool = True) -> Iterator[torch.Tensor]:
        """The tensor in memory for the length of a `with` block; then written back."""
        tensor = self.swap_in(key)
        yield tensor
        if write_back:
            self.swap_out(key, tensor)

    # --- the rest -----------------------------------------------------------------------------

    def discard(self, key: str, *, missing_ok: bool = False) -> None:
        """Forget a tensor; its place is used again. Tensors tied to it keep theirs."""
        if missing_ok and key not in self._stored:
            return
        self._known(key)
        self._forget_prefetched([key])
        stored = self._stored[key]
        if stored.key_count == 1 and stored.name in self._names:
            self._store.free(stored.name)  # a timeout leaves all as it was
            self._names.remove(stored.name)
        del self._stored[key]
        stored.key_count -= 1

    def keys(self) -> list[str]:
        """The names stored, in order of first writing."""
        return list(self._stored)

    def stats(self) -> StoreStats:
        """Counters since the start."""
        return self._store.stats()

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._forget_prefetched(list(self._prefetched))
        self._space.close()
        self._staging.close()

    def __enter__(self) -> TensorSwapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _store(self) -> Store:
        if self._space.store is None:
            raise SwapUsageError("this swapper is closed", fix="open a new one")
        return self._space.store

    def _known(self, key: str) -> StoredTensor:
        stored = self._stored.get(key)
        if stored is None:
            self._store.spec(key)  # raises, naming the nearest key
            raise SwapUsageError(f"no tensor is stored as {key!r}")
        return stored

    def _forget_prefetched(self, keys: Iterable[str]) -> None:
        if self._prefetched:
            for key in keys:
                if key in self._prefetched:
                    self._prefetched.pop(key).drop()

    def _tie(self, key: str, owner: str) -> None:
        """From now on the key's tensor is what is stored for another one."""
        self.discard(key, missing_ok=True)
        stored = self._stored[key] = self._stored[owner]
        stored.key_count += 1
        stored.layout = None

    def _file_order(self, keys: Iterable[str]) -> list[str]:
        """Keys as they lie in the file, new ones last. What follows then meets together what was
        made together: that halves its time when there are too many for the caches."""
        known, keys = self._stored, list(keys)
        try:
            offsets = [known[key].offset_bytes for key in keys]
        except KeyError:
            offsets = [known[key].offset_bytes if key in known else NOWHERE for key in keys]
        return [keys[index] for index in sorted(range(len(keys)), key=offsets.__getitem__)]

    def _place(
        self, key: str, dense: torch.Tensor, device: torch.device,
        fresh: dict[str, StoredTensor], *, is_staged: bool,
    ) -> StoredTensor:
        """Where the key's next tensor goes: its old place, or a new one that joins `fresh`."""
        old = self._stored.get(key)
        placed = StoredTensor.like(key, dense, device)
        if is_staged and placed.spec.nbytes > self._staging.slot_nbytes:
            placed.is_in_parts, placed.layout = True, None
        # Parts of an old one must not be taken for parts of this.
        may_stay = old is not None and old.key_count == 1 and not placed.is_in_parts
        if old is not None and may_stay and old.spec == placed.spec:
            placed.name, placed.offset_bytes = old.name, old.offset_bytes
        else:
            self.discard(key, missing_ok=True)
            while placed.name in self._names:  # of a tensor tied to this key's last one
                placed.name = f"{key}~{next(self._numbers)}"
            self._names.add(placed.name)
            fresh[placed.name] = placed
        self._stored[key] = placed
        return placed


def _blocks(whole: list[_Element]) -> Iterator[list[_Element]]:
    """Few enough at a time that the drive has its first work soon, and that caches keep them."""
    return (whole[begin : begin + _BLOCK_COUNT] for begin in range(0, len(whole), _BLOCK_COUNT))
