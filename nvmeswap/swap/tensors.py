"""`TensorSwapper`: any tensor to NVMe and back, by name. The standalone door."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from nvmeswap.config import AioConfig, SwapBlock, check_folder
from nvmeswap.errors import SwapError, SwapManifestError, SwapTimeoutError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.stats import StoreStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.request import raise_first
from nvmeswap.store.store import Store, StoreBatch, StoreRequest
from nvmeswap.swap.space import Placement, SwapSpace, new_run_name

TENSORS_FILE = "tensors.swp"

_NOWHERE = 1 << 63  # behind all that has a place
# What such a tensor says of itself holds for its memory; another subclass may have none.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_layout_of = attrgetter("dtype", "shape", "is_cpu")


class TensorFuture:
    """A swap under way. `wait` returns the tensor: what was read, or what is being written.

    Threads: any. Ownership: the tensor must not be changed before `done()`.
    """

    def __init__(
        self, request: StoreRequest | None, index: int, host: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._request = request
        self._index = index  # among those that were asked for together
        self._host = host
        self._out = out

    def done(self) -> bool:
        """True when `wait` will not block for the disk."""
        return self._request is None or self._request.done()

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """The tensor; raises SwapReadError, SwapWriteError, SwapChecksumError or SwapTimeoutError
        (after which waiting again is legal). None: the swapper's own time limit."""
        if self._request is not None:
            failures = self._request.failed(timeout_s)
            if self._index in failures:
                raise failures[self._index]
        if self._host is not self._out:
            self._out.copy_(self._host)
            self._host = self._out
        return self._out

    def into(self, out: torch.Tensor) -> TensorFuture:
        """The same, into another tensor."""
        return TensorFuture(self._request, self._index, self._host, out)

    def drop(self) -> None:
        """Says that nobody needs what is read, so that it can be cancelled."""
        if self._request is not None:
            self._request.drop()


@dataclass(slots=True)
class _Stored:
    """A tensor on NVMe: `key_count` keys share it when they are tied.

    `layout`: what `_layout_of` says of tensors whose memory is the stored bytes, if they are
    contiguous. None where more would have to be asked. (Of dimensions of size 1 the stride means
    nothing; those of the first tensor are kept.)
    """

    name: str
    spec: TensorSpec
    device: torch.device
    offset_bytes: int = _NOWHERE
    key_count: int = 1
    layout: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        meta = torch.empty(self.spec.shape, dtype=self.spec.dtype, device="meta")
        simple = not meta.is_complex() and meta.stride() == self.spec.stride
        if simple and self.device.type == "cpu":
            self.layout = (self.spec.dtype, self.spec.shape, True)

    def new_tensor(self, device: torch.device | None = None) -> torch.Tensor:
        spec = self.spec
        return torch.empty_strided(
            spec.shape, spec.stride, dtype=spec.dtype, device=device or self.device
        )


class TensorSwapper:
    """Tensors on NVMe by name: each comes back with its dtype, shape, stride and device.

        with TensorSwapper("/mnt/nvme") as swapper:
            swapper.swap_out("weight", weight)
            weight = swapper.swap_in("weight")
            swapper.swap_out_many(moments)               # a dict, at the speed of the disk
            swapper.swap_in_many(moments, out=moments)

    Args: `nvme_path`, an existing folder; `swap` and `aio`, as in the JSON.
    Raises: SwapPathError on construction; SwapSpaceError and SwapWriteError on swap_out, with the
    tensor in memory intact; SwapReadError, SwapChecksumError, SwapManifestError on swap_in.
    Blocking: all but the forms called `_async` and `prefetch`. Threads: one at a time.
    Ownership: tensors are the caller's. The files are scratch: `close` removes them.
    Not for state that must outlive the process: that is a checkpoint.
    """

    def __init__(
        self,
        nvme_path: str | Path,
        *,
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
    ) -> None:
        check_folder(Path(nvme_path), key="nvme_path")
        self._space = SwapSpace(
            Placement(Path(nvme_path), new_run_name()),
            {},
            swap=swap or SwapBlock(),
            aio=aio or AioConfig(),
            pin_memory=False,
        )
        self._stored: dict[str, _Stored] = {}
        self._names: set[str] = set()  # of all of them
        self._prefetched: dict[str, TensorFuture] = {}
        self._numbers = itertools.count()

    # --- out ----------------------------------------------------------------------------------

    def swap_out(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor under a key, replacing what was there."""
        self.swap_out_async(key, tensor).wait()

    def swap_out_async(self, key: str, tensor: torch.Tensor) -> TensorFuture:
        """The same, not waited for. On the CPU the tensor itself is the source: leave it unchanged
        until the future is done."""
        batch = self._start_writing([key], [tensor])
        return _futures(batch, [tensor], [tensor])[0]

    def swap_out_many(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write several tensors at once; those that are the same memory are stored once. If some
        can't be written the others are, and the error names those."""
        keys, sources = list(tensors), list(tensors.values())
        order = self._file_order(keys)
        keys, sources = [keys[each] for each in order], [sources[each] for each in order]
        ties = _ties(keys, sources)
        if ties:
            keys = [key for key in keys if key not in ties]
            sources = [tensors[key] for key in keys]
        batch = self._start_writing(keys, sources)
        for key, owner in ties.items():
            self.discard(key, missing_ok=True)
            self._stored[key] = self._stored[owner]
            self._stored[key].key_count += 1
        batch.wait()

    def _start_writing(self, keys: list[str], tensors: list[torch.Tensor]) -> StoreBatch:
        """Each to where it was, if the tensor is like the one before; else to a new place."""
        self._forget_prefetched(keys)
        stored = [self._stored.get(key) for key in keys]
        fits = _fit([each if each and each.key_count == 1 else None for each in stored], tensors)
        if not all(fits):
            tensors = self._make_room(stored, keys, tensors, fits)
        names = [each.name for each in stored if each]
        return self._store.write_many(names, tensors, lane=Lane.DEMAND)

    def _make_room(
        self,
        stored: list[_Stored | None],
        keys: list[str],
        tensors: list[torch.Tensor],
        fits: list[bool],
    ) -> list[torch.Tensor]:
        """Replaces those of `stored` that do not fit; returns memories of the CPU to write."""
        others = [index for index, each in enumerate(fits) if not each]
        hosts = [_on_host(keys[index], tensors[index]) for index in others]
        memories = list(tensors)
        fresh: dict[str, _Stored] = {}
        for index, host in zip(others, hosts, strict=True):
            spec = TensorSpec(host.dtype, tuple(host.shape), tuple(host.stride()))
            stored[index] = self._place(keys[index], spec, tensors[index].device, fresh)
            memories[index] = _flat(host)
        try:
            specs = {name: each.spec for name, each in fresh.items()}
            offsets = self._store.allocate_many(TENSORS_FILE, specs)
        except BaseException:
            for index in others:
                if self._stored[keys[index]].name in fresh:
                    del self._stored[keys[index]]
            self._names -= fresh.keys()
            raise
        for each, offset_bytes in zip(fresh.values(), offsets, strict=True):
            each.offset_bytes = offset_bytes
        return memories

    # --- in -----------------------------------------------------------------------------------

    def swap_in(self, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor: into `out` (same dtype and shape, any stride and device), or a new one."""
        return self.swap_in_async(key, out).wait()

    def swap_in_async(self, key: str, out: torch.Tensor | None = None) -> TensorFuture:
        """The same, not waited for; `out` is complete when the future was waited for."""
        ready = self._prefetched.get(key)
        if ready is not None:
            if out is not None:
                _check_out(key, self._stored[key].spec, out)
                ready = ready.into(out)
            del self._prefetched[key]
            return ready
        return _futures(*self._start_reading([key], [out], Lane.DEMAND))[0]

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
        others = [key for key in asked if key not in ready] if ready else asked
        others = [others[each] for each in self._file_order(others)]
        given_outs = [given.get(key) for key in others]
        batch, hosts, outs = self._start_reading(others, given_outs, Lane.DEMAND)
        failures = {others[index]: error for index, error in batch.failed().items()}
        for key, host, each in zip(others, hosts, outs, strict=True):
            if host is not each and key not in failures:
                each.copy_(host)
        tensors = dict(zip(others, outs, strict=True))
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
        keys = [key for key in dict.fromkeys(keys) if key not in self._prefetched]
        keys = [keys[each] for each in self._file_order(keys)]
        futures = _futures(*self._start_reading(keys, [None] * len(keys), Lane.PREFETCH))
        self._prefetched.update(zip(keys, futures, strict=True))

    def _start_reading(
        self, keys: list[str], given: Sequence[torch.Tensor | None], lane: Lane
    ) -> tuple[StoreBatch, list[torch.Tensor], list[torch.Tensor]]:
        """The batch, the tensors on the host that it reads into, and those that shall have it."""
        stored = [self._stored.get(key) or self._known(key) for key in keys]
        outs = [
            each.new_tensor() if out is None else out
            for each, out in zip(stored, given, strict=True)
        ]
        hosts, memories = list(outs), list(outs)
        for index, fits in enumerate(_fit(stored, outs)):
            if fits:
                continue
            spec, out = stored[index].spec, outs[index]
            _check_out(keys[index], spec, out)
            if not (out.is_cpu and out.stride() == spec.stride) or out.is_neg() or out.is_conj():
                hosts[index] = stored[index].new_tensor(torch.device("cpu"))
            memories[index] = _flat(hosts[index])
        batch = self._store.read_many([each.name for each in stored], memories, lane=lane)
        return batch, hosts, outs

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
        stored = self._stored.pop(key)
        stored.key_count -= 1
        if stored.key_count == 0:
            self._names.remove(stored.name)
            self._store.free(stored.name)

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

    def __enter__(self) -> TensorSwapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _store(self) -> Store:
        if self._space.store is None:
            raise SwapUsageError("this swapper is closed", fix="open a new one")
        return self._space.store

    def _known(self, key: str) -> _Stored:
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

    def _file_order(self, keys: list[str]) -> list[int]:
        """The indices of keys as they lie in the file. What follows then meets what was made
        together together, which halves its time when there are too many for the caches."""
        known = self._stored
        offsets = [known[key].offset_bytes if key in known else _NOWHERE for key in keys]
        return sorted(range(len(keys)), key=offsets.__getitem__)

    def _place(
        self, key: str, spec: TensorSpec, device: torch.device, fresh: dict[str, _Stored]
    ) -> _Stored:
        """Where the key's next tensor goes: its old place, or a new one that joins `fresh`."""
        stored = self._stored.get(key)
        if stored is not None and stored.key_count == 1 and stored.spec == spec:
            placed = _Stored(stored.name, spec, device, stored.offset_bytes)
        else:
            self.discard(key, missing_ok=True)
            # A tensor tied to this key's last one may still be stored under its name.
            name = key if key not in self._names else f"{key}~{next(self._numbers)}"
            self._names.add(name)
            placed = fresh[name] = _Stored(name, spec, device)
        self._stored[key] = placed
        return placed


def _fit(stored: Sequence[_Stored | None], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Of each tensor: is its own memory what is stored, so that it can be moved as it is?"""
    return [
        each is not None
        and each.layout == layout
        and type(tensor) in _PLAIN_TYPES
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for each, tensor, layout in zip(stored, tensors, map(_layout_of, tensors), strict=True)
    ]


def _ties(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, str]:
    """Of each tensor that is the same memory as one before it, that one's key."""
    try:
        places = set(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return {}  # one has no memory; it is refused where it is named
    if len(places) == len(tensors):
        return {}
    owners: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            owner = owners.setdefault(place, key)
            if owner != key:
                ties[key] = owner
    return ties


def _futures(
    batch: StoreBatch, hosts: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
) -> list[TensorFuture]:
    requests: list[StoreRequest | None] = [None] * len(outs)
    for request in batch.requests:
        for index in request.pieces.indices:
            requests[index] = request
    return [
        TensorFuture(request, index, host, out)
        for index, (request, host, out) in enumerate(zip(requests, hosts, outs, strict=True))
    ]


def _on_host(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A dense CPU tensor with the same elements: itself, if it is one."""
    if tensor.is_sparse or tensor.is_quantized or tensor.is_meta:
        raise SwapUsageError(
            f"{key}: only dense tensors with data can be swapped out",
            fix="swap its parts (indices, values, scales) one by one",
        )
    return _dense(tensor).to("cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Without gaps and overlaps in memory; the stride is kept if it has none (channels_last,
    transposed), else it becomes contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, in its order."""
    return torch.as_strided(dense, (dense.numel(),), (1,))


def _check_out(key: str, spec: TensorSpec, out: torch.Tensor) -> None:
    for field, stored, given in (
        ("dtype", spec.dtype, out.dtype),
        ("shape", spec.shape, tuple(out.shape)),
    ):
        if stored != given:
            raise SwapManifestError(
                f"{key} is stored with {field} {stored}, not {given}",
                field=field,
                fix="give an `out` like the stored tensor",
            )
