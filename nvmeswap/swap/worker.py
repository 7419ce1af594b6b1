"""The thread that an optimizer's sub-groups belong to.

All that touches them runs there, one job after the other, so that nothing needs a lock, backward
can go on meanwhile, and Ctrl-C, which Python raises in the main thread only, never stops an update
half way: it asks the job to stop, and the job does so between two sub-groups.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from nvmeswap.errors import SwapForkError, SwapUsageError

_T = TypeVar("_T")


class Job(Generic[_T]):
    """A call on its way: `wait` for its result. `stop_asked` is for the call itself to look at;
    `is_behind` tells that the caller does not wait at once."""

    def __init__(self, call: Callable[[Job[_T]], _T], *, is_behind: bool) -> None:
        self.stop_asked = False
        self.is_behind = is_behind
        self._call: Callable[[Job[_T]], _T] | None = call
        self._is_over = False
        # Held until then, instead of an Event: Ctrl-C in the middle of that one's Python code would
        # leave it locked.
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Copies of a job that runs behind others must not wait for all that these have queued.
            self._stream = torch.cuda.Stream() if is_behind else torch.cuda.current_stream()

    def run(self) -> None:
        """On the worker's thread, on the caller's GPU stream, or on one of its own if it is behind;
        once only."""
        if self._call is None:
            return
        stream = contextlib.nullcontext() if self._stream is None else (
            torch.cuda.stream(self._stream)
        )
        try:
            with stream:
                self._result = self._call(self)
        except BaseException as error:
            self._error = error
        self._call = None
        self._is_over = True
        self._under_way.release()

    def is_over(self) -> bool:
        return self._is_over

    def stop(self) -> None:
        """Ask it to stop, and wait until it has; how it ended is not told."""
        self.stop_asked = True
        with self._under_way:
            pass

    def wait(self) -> _T:
        """The call's result, or what it raised. If the wait is interrupted (Ctrl-C), the call is
        asked to stop and waited for; an interruption of that, too, leaves it to end by itself."""
        try:
            with self._under_way:
                pass
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Worker:
    """One thread. `call` runs something on it and waits; `start` does not wait.

    `thread_count`: of torch's threads for what runs there.
    Raises SwapForkError in a forked child, where the thread does not exist.
    Threads: `call` and `start` from any, one at a time.
    """

    def __init__(self, thread_count: int) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._started: Job[object] | None = None
        ready = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(self._jobs, thread_count, ready), name="nvmeswap-update", daemon=True
        )
        self._thread.start()
        ready.wait()
        # The thread's own limit was also made that of new threads: take that back.
        torch.set_num_threads(torch.get_num_threads())
        self.close = weakref.finalize(self, self._jobs.put, None)

    def start(self, call: Callable[[Job[_T]], _T], *, is_behind: bool) -> Job[_T]:
        """Run `call` with its job as argument. While one `is_behind`, nothing else is taken on."""
        if os.getpid() != self._process:
            raise SwapForkError(
                "this optimizer belongs to another process",
                fix="build one in the child, after the fork",
            )
        self._end_last_job()
        job = Job(call, is_behind=is_behind)
        self._started = job  # type: ignore[assignment]
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def _end_last_job(self) -> None:
        last = self._started
        if last is None or last.is_over():
            return
        if last.is_behind and not last.stop_asked:
            raise SwapUsageError(
                "the optimizer is in the middle of a step", fix="call step() first, it waits for it"
            )
        # Its caller was interrupted before it could wait, or even before the job was handed over.
        last.stop_asked = True
        self._jobs.put(last)
        last.stop()

    def call(self, call: Callable[[], _T]) -> _T:
        """Run `call` on the thread; returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return call()
        return self.start(lambda job: call(), is_behind=False).wait()


def _run(
    jobs: queue.SimpleQueue[Job[object] | None], thread_count: int, ready: threading.Event
) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(thread_count)
    ready.set()
    while (job := jobs.get()) is not None:
        job.run()
        del job
