"""Tensors that are being read or written, and those who wait for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvmeswap.errors import SwapError
from nvmeswap.store.store import StoreBatch, StoreRequest
from nvmeswap.swap.layout import copy_into


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
            copy_into(self._out, self._host)
            self._host = self._out
        return self._out

    def into(self, out: torch.Tensor) -> TensorFuture:
        """The same, into another tensor."""
        return TensorFuture(self._request, self._index, self._host, out)

    def drop(self) -> None:
        """Says that nobody needs what is read, so that it can be cancelled."""
        if self._request is not None:
            self._request.drop()


class Reading:
    """A batch under way: into tensors on the host, which are those to be filled wherever these can
    be read into."""

    def __init__(
        self, batch: StoreBatch, hosts: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        self.outs = outs
        self._batch = batch
        self._hosts = hosts

    def finish(self) -> dict[int, SwapError]:
        """Waits and fills; returns what went wrong, by index."""
        failures = self._batch.failed()
        if self._hosts is not self.outs:
            for index, (host, out) in enumerate(zip(self._hosts, self.outs, strict=True)):
                if host is not out and index not in failures:
                    copy_into(out, host)
        return failures

    def futures(self) -> list[TensorFuture]:
        """One for each tensor, to be waited for one by one instead."""
        requests: list[StoreRequest | None] = [None] * len(self.outs)
        for request in self._batch.requests:
            for index in request.pieces.indices:
                requests[index] = request
        return [
            TensorFuture(request, index, host, out)
            for index, (request, host, out) in enumerate(
                zip(requests, self._hosts, self.outs, strict=True)
            )
        ]
