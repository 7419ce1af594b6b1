"""A GPU's streams, made up: a work queue each, that does what is in it as late as can be, or, if it
is `eager`, as early. So whoever forgets to wait for another stream finds what was there before, or
overwrites what is still to be read; on a real GPU that takes luck."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

Work = Callable[[], object]


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, len(stream.queued)

    def query(self) -> bool:
        return self.stream.done_count >= self.position

    def synchronize(self) -> None:
        self.stream.finish(self.position)


class Stream:
    def __init__(self, device: object = None, *, eager: bool = False) -> None:
        self.queued: list[Work | Event] = []
        self.done_count = 0
        self.eager = eager

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other  # as torch's: it never differs from None

    __hash__ = object.__hash__

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.queue(event)

    def wait_stream(self, other: Stream) -> None:
        self.queue(other.record_event())

    def queue(self, work: Work | Event) -> None:
        self.queued.append(work)
        self.go_on()

    def go_on(self) -> None:
        """What an eager one can do without making others work."""
        while self.eager and self.done_count < len(self.queued):
            work = self.queued[self.done_count]
            if isinstance(work, Event) and not work.query():
                return
            self._do(work)

    def finish(self, position: int | None = None) -> None:
        while self.done_count < (len(self.queued) if position is None else position):
            self._do(self.queued[self.done_count])

    def _do(self, work: Work | Event) -> None:
        work.synchronize() if isinstance(work, Event) else work()
        self.done_count += 1


class Late(torch.Tensor):
    """Memory on the device: what is copied to it is queued. `plain` is the memory itself."""

    plain: torch.Tensor
    gpu: Gpu
    is_cuda = True  # type: ignore[assignment]

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Late:  # type: ignore[override]
        plain = self.plain
        self.gpu.current.queue(lambda: plain.copy_(source))
        return self


class Gpu:
    """In place of `torch` in the modules under test. What is allocated is NaN, by work on the
    current stream, and freed memory is the next one's at once."""

    def __init__(self, *, eager: bool) -> None:
        self.compute = self.current = Stream()
        self.side_streams: list[Stream] = []
        self._eager = eager
        self._free: list[torch.Tensor] = []
        self.cuda = SimpleNamespace(
            Stream=self._new_stream, Event=Event, stream=self._on,
            current_stream=lambda device=None: self.current,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Late:
        fitting = [each for each in self._free if each.numel() == numel]
        plain = fitting[-1] if fitting else torch.empty(numel, dtype=dtype)
        self._free[:] = [each for each in self._free if each is not plain]  # they know this list
        self.current.queue(lambda: plain.fill_(torch.nan))
        late = plain.as_subclass(Late)
        late.plain, late.gpu = plain, self
        weakref.finalize(late, self._free.append, plain)
        return late

    def read(self, values: Late, into: list[torch.Tensor]) -> None:
        """Queue a use on the current stream."""
        plain = values.plain
        self.current.queue(lambda: into.append(plain.clone()))

    def work(self, count: int) -> None:
        """Let the computing stream do so much, and then the others what they can."""
        compute = self.compute
        compute.finish(min(len(compute.queued), compute.done_count + count))
        for stream in self.side_streams:
            stream.go_on()

    def _new_stream(self, device: object) -> Stream:
        self.side_streams.append(Stream(eager=self._eager))
        return self.side_streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before
