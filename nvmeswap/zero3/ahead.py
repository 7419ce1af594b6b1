"""Shards that come next are copied to the GPU while it computes.

FSDP2 gathers on a stream of its own where several ranks share a parameter. Where a rank has all of
it, FSDP2 asks for it when it is needed, on the stream that computes, which would wait for the copy.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.shard import ShardSpec


@dataclass(frozen=True, slots=True)
class _Copy:
    values: torch.Tensor
    version: int  # of the shard, when it was copied
    arrived: torch.cuda.Event | None
    stream: torch.cuda.Stream | None  # that the memory was taken on


def budget_nbytes(groups: Iterable[Sequence[ShardSpec]]) -> int:
    """What copies ahead may take, of the swapped shards of each group that FSDP2 gathers: the
    largest group twice, so that the next comes while one is used."""
    return 2 * max((sum(spec.nbytes for spec in specs) for specs in groups), default=0)


class DeviceAhead:
    """Copies of the next shards of the step's plan, at most `budget_nbytes` at a time. A batch is
    copied when half of that is free: to turn to another stream takes as long as to queue a copy.

        ahead = DeviceAhead(params, device, budget_nbytes)
        values = ahead.take(key)        # None: it was not copied, or changed since
        ahead.look_ahead()              # after each use, and when a step is over

    Memory is taken on the stream that computes, so what that has freed can be used again; copies
    wait for what it has queued by then, and it for them. On the CPU they are over at once.

    Blocking: no call waits, for the drive or for the device. Threads: one at a time.
    """

    def __init__(
        self, params: PartitionedParamSwapper, device: torch.device, budget_nbytes: int
    ) -> None:
        self._params = params
        self._device = device
        self._budget_nbytes = budget_nbytes
        self._copies: dict[str, _Copy] = {}
        self._nbytes = 0
        self._step_count = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, key: str) -> torch.Tensor | None:
        """A use of the shard: its copy, flat, for the current stream; or None."""
        copy = self._drop(key)
        if copy is None:
            self._clear()  # what is there was to come before this, and might not come at all
            return None
        return copy.values if self._params.use_copy(key, copy.version) else None

    def look_ahead(self) -> None:
        """Start to copy the next shards, as far as they are in host memory and the budget goes."""
        if self._step_count != self._params.step_count:
            self._step_count = self._params.step_count
            self._clear()  # the last step's plan was wrong about these
        if 2 * self._nbytes > self._budget_nbytes:
            return
        batch = self._memory_for_next()
        if not batch:
            return
        try:
            self._copy(batch)
        except BaseException:  # Ctrl-C: the memory is not to be another's before it is written
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            raise

    def _memory_for_next(self) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        nbytes = self._nbytes
        for key in self._params.next_uses():
            if key in self._copies or key in batch:
                continue
            spec = self._params.spec(key)
            nbytes += spec.nbytes
            if nbytes > self._budget_nbytes or not self._params.is_ready(key):
                break
            values = self._memory_for(spec)
            if values is None:
                return {}
            batch[key] = values
        return batch

    def _copy(self, batch: Mapping[str, torch.Tensor]) -> None:
        versions = {}
        with self._copying() as stream:
            for key, values in batch.items():
                version = self._params.copy_ahead(key, values)
                if version is None:
                    break
                versions[key] = version
            arrived = None if self._stream is None else self._stream.record_event()
        for key, version in versions.items():
            self._copies[key] = _Copy(batch[key], version, arrived, stream)
            self._nbytes += batch[key].nbytes

    def close(self) -> None:
        """Drop all copies and make no more. May be repeated."""
        self._clear()
        self._budget_nbytes = 0

    def _memory_for(self, spec: ShardSpec) -> torch.Tensor | None:
        """None where the device has no room for it: then nothing is copied ahead any more."""
        try:
            return torch.empty(spec.numel, dtype=spec.dtype, device=self._device)
        except torch.OutOfMemoryError:
            self.close()
            warnings.warn(
                f"{self._device} has no room for shards that are copied to it ahead of their use, "
                "so each is copied when it is needed, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def _clear(self) -> None:
        for key in list(self._copies):
            self._drop(key)

    def _drop(self, key: str) -> _Copy | None:
        """Its memory may be used again, on the current stream, once the copy is over."""
        copy = self._copies.get(key)
        if copy is None:
            return None
        if copy.arrived is not None:  # first, or Ctrl-C would free it under the copy
            stream = torch.cuda.current_stream()
            stream.wait_event(copy.arrived)
            if stream != copy.stream:
                copy.values.record_stream(stream)
        del self._copies[key]
        self._nbytes -= copy.values.nbytes
        return copy

    @contextlib.contextmanager
    def _copying(self) -> Iterator[torch.cuda.Stream | None]:
        """Gives the stream that computes."""
        if self._stream is None:
            yield None
            return
        computing = torch.cuda.current_stream()
        # After the allocation: with deterministic algorithms torch fills what it allocates.
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield computing
