"""Shards that come next are copied to the GPU while it computes.

FSDP2 gathers on a stream of its own where several ranks share a parameter. Where a rank has all of
it, FSDP2 asks for it when it is needed, on the stream that computes, which would wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvmeswap.swap.params import PartitionedParamSwapper


@dataclass(eq=False, slots=True)
class _Batch:
    """Copies that were queued together. `taken_on`: the stream that their memory is from;
    `awaited_on`: the last that waits for them."""

    arrived: torch.cuda.Event
    taken_on: torch.cuda.Stream
    awaited_on: torch.cuda.Stream | None = None


@dataclass(frozen=True, slots=True)
class _Copy:
    values: torch.Tensor
    version: int  # of the shard, when it was copied
    batch: _Batch | None  # None on the CPU


class DeviceAhead:
    """Copies of the next shards of the step's plan, at most `budget_nbytes` at a time.

        ahead = DeviceAhead(params, device, budget_nbytes)
        values = ahead.take(key)        # None: it was not copied, or changed since
        ahead.look_ahead()              # after each use

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
        if copy is None or not self._params.use_copy(key, copy.version):
            return None
        return copy.values

    def look_ahead(self) -> None:
        """Start to copy the next shards, as far as they are in host memory and the budget goes;
        several at a time, because each call of CUDA's takes time that the GPU has to wait."""
        if self._step_count != self._params.step_count:
            self._step_count = self._params.step_count
            self._clear()  # the last step's plan was wrong about these
        if 2 * self._nbytes > self._budget_nbytes:
            return
        keys = self._next_keys()
        if not keys:
            return
        specs = [self._params.spec(key) for key in keys]
        outs = [torch.empty(each.numel, dtype=each.dtype, device=self._device) for each in specs]
        versions, batch = self._copy(keys, outs)
        for key, values, version in zip(keys, outs, versions, strict=False):
            self._copies[key] = _Copy(values, version, batch)
            self._nbytes += values.nbytes

    def _next_keys(self) -> list[str]:
        keys: dict[str, None] = {}
        left_nbytes = self._budget_nbytes - self._nbytes
        for key in self._params.next_uses():
            if key in self._copies or key in keys:
                continue
            left_nbytes -= self._params.spec(key).nbytes
            if left_nbytes < 0:
                break
            keys[key] = None
        return list(keys)

    def _clear(self) -> None:
        for key in list(self._copies):
            self._drop(key)

    def _drop(self, key: str) -> _Copy | None:
        """Its memory may be used again, on the current stream, once the copy is over."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            self._nbytes -= copy.values.nbytes
            if copy.batch is not None:
                self._await(copy.batch, copy.values)
        return copy

    def _await(self, batch: _Batch, values: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        if batch.awaited_on != stream:
            stream.wait_event(batch.arrived)
            batch.awaited_on = stream
        if batch.taken_on != stream:
            values.record_stream(stream)

    def _copy(
        self, keys: list[str], outs: list[torch.Tensor]
    ) -> tuple[list[int], _Batch | None]:
        if self._stream is None:
            return self._params.copy_ahead(keys, outs), None
        # After the allocations: with deterministic algorithms torch fills what it allocates.
        taken_on = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(taken_on)
        with torch.cuda.stream(self._stream):
            versions = self._params.copy_ahead(keys, outs)
        return versions, _Batch(self._stream.record_event(), taken_on)
