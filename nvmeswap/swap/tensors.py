"""`TensorSwapper`: any tensor to NVMe and back, by name. The standalone door."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nvmeswap.config import AioConfig, SwapBlock, check_folders
from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.stats import StoreStats
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store, StoreRequest
from nvmeswap.swap.space import Placement, SwapSpace, new_run_name

TENSORS_FILE = "tensors.swp"


class TensorFuture:
    """A swap under way. `wait` returns the tensor: what was read, or what is being written.

    Threads: any. Ownership: the tensor must not be changed before `done()`.
    """

    def __init__(self, request: StoreRequest | None, host: torch.Tensor, out: torch.Tensor) -> None:
        self._request = request
        self._host = host
        self._out = out

    def done(self) -> bool:
        """True when `wait` will not block for the disk."""
        return self._request is None or self._request.done()

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """The tensor; raises SwapReadError, SwapWriteError, SwapChecksumError or SwapTimeoutError
        (after which waiting again is legal). None: the swapper's own time limit."""
        if self._request is not None:
            self._request.wait(timeout_s)
        if self._host is not self._out:
            self._out.copy_(self._host)
            self._host = self._out
        return self._out


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is known of a stored tensor; `stored_as` differs from its key for tied tensors."""

    stored_as: str
    device: torch.device


class TensorSwapper:
    """Tensors on NVMe by name: each comes back with its dtype, shape, stride and device.

        with TensorSwapper("/mnt/nvme") as swapper:
            swapper.swap_out("weight", weight)
            weight = swapper.swap_in("weight")

    Args: `nvme_path`, an existing folder, or one on each of several drives; `swap` and `aio`, as in
    the JSON.
    Raises: SwapPathError on construction; SwapSpaceError and SwapWriteError on swap_out, with the
    tensor in memory intact; SwapReadError, SwapChecksumError, SwapManifestError on swap_in.
    Blocking: all but the forms called `_async` and `prefetch`. Threads: one at a time.
    Ownership: tensors are the caller's. The files are scratch: `close` removes them.
    Not for state that must outlive the process: that is a checkpoint.
    """

    def __init__(
        self,
        nvme_path: str | Path | Sequence[str | Path],
        *,
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
    ) -> None:
        folders = check_folders(nvme_path, key="nvme_path")
        self._space = SwapSpace(
            Placement(folders, new_run_name()),
            {},
            swap=swap or SwapBlock(),
            aio=aio or AioConfig(),
            pin_memory=False,
        )
        self._kept: dict[str, _Kept] = {}
        self._prefetched: dict[str, TensorFuture] = {}
        self._numbers = itertools.count()

    # --- out ----------------------------------------------------------------------------------

    def swap_out(self, key: str, tensor: torch.Tensor) -> None:
        """Write a tensor under a key, replacing what was there."""
        self.swap_out_async(key, tensor).wait()

    def swap_out_async(self, key: str, tensor: torch.Tensor) -> TensorFuture:
        """The same, not waited for. On the CPU the tensor itself is the source: leave it unchanged
        until the future is done."""
        if tensor.is_sparse or tensor.is_quantized or tensor.is_meta:
            raise SwapUsageError(
                f"{key}: only dense tensors with data can be swapped out",
                fix="swap its parts (indices, values, scales) one by one",
            )
        self.discard(key, missing_ok=True)
        dense = _dense(tensor)
        host = dense.to("cpu")
        spec = TensorSpec(host.dtype, tuple(host.shape), tuple(host.stride()))
        # A tensor tied to this key's last one may still be stored under its name.
        taken = {kept.stored_as for kept in self._kept.values()}
        stored_as = key if key not in taken else f"{key}~{next(self._numbers)}"
        self._store.allocate(TENSORS_FILE, stored_as, spec)
        self._kept[key] = _Kept(stored_as, tensor.device)
        if host.numel() == 0:
            return TensorFuture(None, tensor, tensor)
        request = self._store.write(stored_as, _flat(host), lane=Lane.DEMAND)
        return TensorFuture(request, tensor, tensor)

    def swap_out_many(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write several tensors at once; those that are the same memory are stored once."""
        stored: dict[tuple[object, ...], str] = {}
        futures = []
        for key, tensor in tensors.items():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            owner = stored.get(place) if tensor.numel() else None
            if owner is None:
                futures.append(self.swap_out_async(key, tensor))
                stored[place] = key
            else:
                self.discard(key, missing_ok=True)
                self._kept[key] = _Kept(self._kept[owner].stored_as, tensor.device)
        for future in futures:
            future.wait()

    # --- in -----------------------------------------------------------------------------------

    def swap_in(self, key: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor: into `out` (same dtype and shape, any stride and device), or a new one."""
        return self.swap_in_async(key, out).wait()

    def swap_in_async(self, key: str, out: torch.Tensor | None = None) -> TensorFuture:
        """The same, not waited for; `out` is complete when the future was waited for."""
        ready = self._prefetched.pop(key, None)
        kept = self._known(key)
        spec = self._store.spec(kept.stored_as)
        if out is not None:
            _check_out(key, spec, out)
        if ready is not None:
            return ready if out is None else TensorFuture(ready._request, ready._host, out)
        if out is None:
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=kept.device)
        direct = out.device.type == "cpu" and out.stride() == spec.stride
        host = out if direct else torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        if host.numel() == 0:
            return TensorFuture(None, out, out)
        request = self._store.read(kept.stored_as, _flat(host), lane=Lane.DEMAND)
        return TensorFuture(request, host, out)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start reading tensors, in this order; the next `swap_in` of each takes what was read."""
        for key in keys:
            if key not in self._prefetched:
                self._prefetched[key] = self.swap_in_async(key)

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
        if missing_ok and key not in self._kept:
            return
        self._known(key)
        self._prefetched.pop(key, None)
        kept = self._kept.pop(key)
        if all(other.stored_as != kept.stored_as for other in self._kept.values()):
            self._store.free(kept.stored_as)

    def keys(self) -> list[str]:
        """The names stored, in order of first writing."""
        return list(self._kept)

    def stats(self) -> StoreStats:
        """Counters since the start."""
        return self._store.stats()

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._prefetched.clear()
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

    def _known(self, key: str) -> _Kept:
        kept = self._kept.get(key)
        if kept is None:
            self._store.spec(key)  # raises, naming the nearest key
            raise SwapUsageError(f"no tensor is stored as {key!r}")
        return kept


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
