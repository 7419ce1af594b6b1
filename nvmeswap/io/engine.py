"""The I/O engine: files in, transfers in, futures out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from nvmeswap.errors import SwapError, SwapTimeoutError, SwapUsageError
from nvmeswap.io import native
from nvmeswap.io.file import STRIPE_NBYTES, DirectMode, File, Member, open_file
from nvmeswap.io.request import Request
from nvmeswap.io.transfer import DeviceRanges, Direction, Lane, pieces_of
from nvmeswap.stats import EngineStats, LaneLatency

if TYPE_CHECKING:
    from nvmeswap._native import EngineHandle, RequestHandle

__all__ = ["DirectMode", "Direction", "Engine", "File", "Lane", "Member"]

_BLOCK_MULTIPLE_NBYTES = 4096
# Of one drive. Demand reads took 2.2 to 2.7 times their idle time behind it, 1.7 to 1.9 behind half
# of it, which costs a stream of reads 6 to 10 % (native/lanes.c).
BACKGROUND_NBYTES = 4 << 20
_BLOCK_LIMIT_NBYTES = 1 << 31
_DRAIN_AT_EXIT_S = 60.0


class Engine:
    """Moves bytes between tensors and swap files, asynchronously.

    One I/O thread of its own cuts requests into blocks, keeps up to `queue_depth` of them in the
    kernel across all requests, and resumes, retries or fails them. Callers get one `Request` for
    each call.

        with Engine() as engine:
            file = engine.open(path)                      # an existing file, large enough
            engine.write(file, 0, tensor).wait()
            engine.read(file, 0, other).wait()

    Args:
        backend: "uring", "aio", "posix", "gds" (posix, and device memory by cuFile), "skeleton"
            (slow, for reference) or "fault" (aio under a script).
        block_nbytes: largest single transfer in bytes; a multiple of 4096, below 2 GiB.
        background_nbytes: most bytes in flight of prefetch and writeback together, from a demand
            until a second after it; otherwise they have the whole queue. None: 4 MiB.
        queue_depth: most blocks in flight.
        thread_count: threads of the backends posix and gds.
        fault_script: faults to inject over `backend`, for tests; see native/fault_script.h.

    Raises: SwapUsageError for a size out of range, SwapConfigError for a backend that is unknown or
    that the kernel refuses, both here; SwapClosedError after `close()`, SwapForkError in a forked
    child, SwapUsageError for a buffer or offset that can't be served, from every other method.
    Blocking: only `close()`. Threads: any. Ownership: of buffers until their request is over; a
    write of odd length into a direct file zeroes its extent up to the file's offset alignment,
    never more, and a read never writes beyond the buffer's last byte. Not a place to keep things
    under names: that is `store`.

    Memory of a GPU is served by the backend gds only, once it is registered, in multiples of 4096
    bytes at addresses that are multiples too. What cuFile refuses goes through host memory, with
    the same bytes (`gds_refusal`). The engine knows nothing of streams: a write's bytes must be
    there when it is started, and nothing under way on the GPU may use a read's memory.
    """

    def __init__(
        self,
        *,
        backend: str = "aio",
        block_nbytes: int = 1 << 20,
        background_nbytes: int | None = None,
        queue_depth: int = 32,
        thread_count: int = 2,
        fault_script: str | None = None,
    ) -> None:
        if block_nbytes % _BLOCK_MULTIPLE_NBYTES or not 0 < block_nbytes < _BLOCK_LIMIT_NBYTES:
            raise SwapUsageError(f"block_nbytes is {block_nbytes}",
                                 fix="use a multiple of 4096 below 2 GiB, such as 1 << 20")
        if background_nbytes is not None and background_nbytes < _BLOCK_MULTIPLE_NBYTES:
            raise SwapUsageError(f"background_nbytes is {background_nbytes}",
                                 fix="use a few blocks, such as 4 << 20")
        if not 1 <= queue_depth <= 1 << 16 or not 1 <= thread_count <= 1 << 10:
            raise SwapUsageError(f"queue_depth is {queue_depth}, thread_count {thread_count}",
                                 fix="use 1 to 65536 and 1 to 1024, such as 32 and 2")
        self.backend = backend
        self._block_nbytes = block_nbytes
        self._pid = os.getpid()
        self._handle = native.open_engine(
            backend=backend, block_nbytes=block_nbytes,
            background_nbytes=background_nbytes or BACKGROUND_NBYTES,
            queue_depth=queue_depth, thread_count=thread_count, fault_script=fault_script,
        )
        self._accepting = True
        self._is_refusal_told = False
        # The handle is used under it, and only while accepting. Reentrant: the collector may drop a
        # DeepSpeed handle, which unregisters memory, while this thread submits.
        self._lock = threading.RLock()
        self._close_lock = threading.Lock()
        # In order of submission. Requests hold their engine, and the finalizer holds this dict: so
        # neither engine nor buffers can go while something is in flight, whoever forgets them.
        self._in_flight: dict[Request, None] = {}
        self._unclaimed: list[Sequence[torch.Tensor]] = []  # of submissions that Ctrl-C cut short
        self._registered: dict[int, torch.Tensor] = {}  # by address; held for the same reason
        self._device_ranges = DeviceRanges()
        self._finalizer = self._when_forgotten(_DRAIN_AT_EXIT_S)

    def open(
        self,
        path: Path,
        *,
        direct: DirectMode = DirectMode.PREFER,
        offset_alignment_nbytes: int = 4096,
        memory_alignment_nbytes: int = 512,
    ) -> File:
        """Open an existing file for reading and writing; the caller has sized it.

        The alignments are what `probe_folder` found, powers of two. Raises SwapPathError when the
        file can't be opened, or not directly although `direct` is REQUIRE.
        """
        return self.open_striped(
            (Member(path, direct=direct, follows_links=True),),
            offset_alignment_nbytes=offset_alignment_nbytes,
            memory_alignment_nbytes=memory_alignment_nbytes,
        )

    def open_striped(
        self,
        members: Sequence[Member],
        *,
        stripe_nbytes: int = STRIPE_NBYTES,
        offset_alignment_nbytes: int = 4096,
        memory_alignment_nbytes: int = 512,
    ) -> File:
        """Open several existing files as one, striped in proportion to their weights.

        The caller has given each the size that `Stripes.share` tells. The alignments are the
        strictest of the members'; a stripe is a multiple of both and of 4096. Raises SwapPathError,
        naming the member, when one can't be opened; SwapUsageError for a layout that can't be
        served. At most 16 members, with weights of 64 in all.
        """
        self._require_own_process()
        self._require_open()
        return open_file(
            members, stripe_nbytes, offset_alignment_nbytes=offset_alignment_nbytes,
            memory_alignment_nbytes=memory_alignment_nbytes, block_nbytes=self._block_nbytes,
        )

    def read(
        self, file: File, offset_bytes: int, buffer: torch.Tensor, *, lane: Lane = Lane.DEMAND
    ) -> Request:
        """Start filling `buffer` from the file."""
        return self._start(file, Direction.READ, (offset_bytes,), (buffer,), lane)

    def write(
        self, file: File, offset_bytes: int, buffer: torch.Tensor, *, lane: Lane = Lane.DEMAND
    ) -> Request:
        """Start writing `buffer` to the file."""
        return self._start(file, Direction.WRITE, (offset_bytes,), (buffer,), lane)

    def read_many(
        self,
        file: File,
        offsets_bytes: Sequence[int],
        buffers: Sequence[torch.Tensor],
        *,
        lane: Lane = Lane.DEMAND,
    ) -> Request:
        """Start filling each buffer from its offset, in one call. They are moved in the order of
        the file, and neighbours there together. One that fails leaves the others alone."""
        return self._start(file, Direction.READ, offsets_bytes, buffers, lane)

    def write_many(
        self,
        file: File,
        offsets_bytes: Sequence[int],
        buffers: Sequence[torch.Tensor],
        *,
        lane: Lane = Lane.DEMAND,
    ) -> Request:
        """Start writing each buffer to its offset, in one call, as `read_many` does. The places
        must not overlap."""
        return self._start(file, Direction.WRITE, offsets_bytes, buffers, lane)

    def register_memory(self, memory: torch.Tensor) -> int:
        """Pin memory for the backend, so that its transfers cost less CPU; returns how many bytes
        from its start were pinned.

        Fewer than asked for (a small `ulimit -l`), or none (a backend that has no use for it), is
        no failure: such memory is moved like any other. Call it once the memory is populated and
        before its first transfer. The engine holds the tensor until `unregister_memory` or `close`.
        Blocks for some milliseconds a GiB.

        With the backend gds it makes a GPU's memory known, all of it, and none of the host's;
        raises SwapUsageError with any other backend, or when CUDA does not know the memory.
        """
        self._require_own_process()
        with self._lock:
            self._require_open()
            if not memory.nbytes:
                return 0
            if memory.data_ptr() in self._registered:
                raise SwapUsageError("this memory is registered already")
            if self.backend != "gds" and not memory.is_cpu:
                raise SwapUsageError(f"the backend {self.backend!r} moves host memory only",
                                     fix='open the engine with backend "gds"')
            nbytes = native.register_memory(self._handle, memory.data_ptr(), memory.nbytes)
            if not memory.is_cpu and nbytes < memory.nbytes:
                native.unregister_memory(self._handle, memory.data_ptr(), memory.nbytes)
                raise SwapUsageError(f"memory of {memory.device} was not registered",
                                     fix="pass a tensor of a CUDA device, such as a DeviceArena's")
            if self.backend == "gds" and nbytes:
                self._device_ranges.add(memory.data_ptr(), nbytes)
            self._registered[memory.data_ptr()] = memory
            return nbytes

    def unregister_memory(self, memory: torch.Tensor) -> None:
        """Undo `register_memory`, when no transfer uses the memory any more."""
        self._require_own_process()
        with self._lock:
            self._require_open()
            if self._registered.pop(memory.data_ptr(), None) is not None:
                self._device_ranges.remove(memory.data_ptr())
                native.unregister_memory(self._handle, memory.data_ptr(), memory.nbytes)

    def stats(self) -> EngineStats:
        """Counters since the engine was opened."""
        self._require_own_process()
        with self._lock:
            self._require_open()
            counters = native.engine_counters(self._handle)
            lanes = {
                lane.name.lower(): _latency(native.engine_latencies(self._handle, lane))
                for lane in Lane
            }
        return EngineStats(**counters, lanes=lanes)

    @property
    def gds_refusal(self) -> str | None:
        """With the backend gds: why cuFile is not used, or not any more, and device memory goes
        through the host's; None while nothing has been refused."""
        self._require_own_process()
        with self._lock:
            self._require_open()
            return native.gds_refusal(self._handle)

    def told_refusal(self) -> str | None:
        """For request.py: `gds_refusal`, which is told in one warning."""
        with self._lock:
            refusal = native.gds_refusal(self._handle) if self._accepting else None
            is_new = refusal is not None and not self._is_refusal_told
            self._is_refusal_told |= is_new
        if is_new:
            warnings.warn("GPUDirect Storage is not used any more; memory of a GPU goes through "
                          f"the host's: {refusal}", RuntimeWarning, stacklevel=2)
        return refusal

    def inject(self, fault_script: str) -> None:
        """For tests: replace the script of an engine opened with `fault_script` or as "fault".
        Blocks are counted anew. Raises SwapUsageError when there is none or it isn't understood."""
        self._require_own_process()
        with self._lock:
            self._require_open()
            native.inject(self._handle, fault_script)

    def close(self, timeout_s: float = 60.0) -> None:
        """Accept nothing more, and block until everything in flight has landed. May be repeated.

        Raises SwapTimeoutError when that takes longer: then buffers stay alive, because a late
        transfer may still land in them, and `close` may be called again. In a forked child it does
        nothing. Errors of the requests stay with the requests.
        """
        if os.getpid() != self._pid:
            return
        with self._close_lock:
            if not self._finalizer.alive:
                return
            with self._lock:
                self._accepting = False
            if native.close_engine(self._handle, timeout_s):
                self._finalizer.detach()
                self._in_flight.clear()
                self._unclaimed.clear()
                self._registered.clear()
                return
            # Whoever has been told once is not made to wait again at exit.
            self._finalizer.detach()
            self._finalizer = self._when_forgotten(0.0)
        raise SwapTimeoutError(
            f"the engine was not drained within {timeout_s} s",
            cause=f"{len(self._in_flight)} requests are not over",
            intact="their buffers stay alive",
            fix="close again; if it never ends, see `dmesg` for the drive's state",
        )

    def cancel(self, request: RequestHandle) -> None:
        """For request.py: drop what has not gone to the drive."""
        self._require_own_process()
        with self._lock:
            if self._accepting:
                native.cancel(self._handle, request)

    def forget(self, request: Request) -> None:
        """For request.py: it is over, so its buffer may go."""
        self._in_flight.pop(request, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self,
        file: File,
        direction: Direction,
        offsets_bytes: Sequence[int],
        buffers: Sequence[torch.Tensor],
        lane: Lane,
    ) -> Request:
        self._require_own_process()
        pieces = pieces_of(file, offsets_bytes, buffers, self._device_ranges)
        on_device = bool(self._device_ranges) and not all(each.is_cpu for each in buffers)
        with self._lock:
            self._require_open()
            try:
                handle = native.submit(self._handle, file.handle, direction, lane, pieces)
                request = Request(handle, self, file, direction, pieces, buffers, on_device)
                self._in_flight[request] = None
            except BaseException as error:
                if not isinstance(error, SwapError):  # Ctrl-C: perhaps it is under way already
                    self._unclaimed.append(buffers)
                raise
        self._prune()
        return request

    def _when_forgotten(self, timeout_s: float) -> weakref.finalize[..., Engine]:
        return weakref.finalize(self, _close_forgotten, self._handle, self._in_flight,
                                (self._unclaimed, self._registered), timeout_s)

    def _prune(self) -> None:
        """Let go of requests that nobody waited for. Oldest first, and no further than the first
        one in flight, so that each costs one look."""
        # Another thread that adds or removes one between `iter` and `next` does the same itself.
        with contextlib.suppress(RuntimeError):
            while (oldest := next(iter(self._in_flight), None)) is not None and oldest.done():
                self.forget(oldest)

    def _require_own_process(self) -> None:
        # Before any lock: in a child it may have been copied while a thread of the parent held it.
        if os.getpid() != self._pid:
            raise native.fork_error()

    def _require_open(self) -> None:
        if not self._accepting:
            raise native.closed_error("the engine")


def _latency(buckets: list[tuple[float, int]]) -> LaneLatency:
    total = sum(count for _, count in buckets)
    reached = 0
    upper_s: list[float] = []  # of the buckets that hold the median, the 99th percentile, the last
    for begin_s, count in buckets:
        reached += count
        while len(upper_s) < 3 and reached >= (0.5, 0.99, 1.0)[len(upper_s)] * total:
            upper_s.append(begin_s * 9 / 8)
    p50_s, p99_s, max_s = upper_s or (0.0, 0.0, 0.0)
    return LaneLatency(total, p50_s, p99_s, max_s)


def _close_forgotten(
    handle: EngineHandle,
    in_flight: dict[Request, None],
    memories: object,
    timeout_s: float,
) -> None:
    """At exit, or when an engine with nothing in flight is collected."""
    if native.close_engine(handle, timeout_s):
        return
    # Interpreter shutdown would free the buffers, and a late transfer would land in freed memory.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(in_flight))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memories))
    if timeout_s > 0:
        warnings.warn(f"{len(in_flight)} transfers were not over {timeout_s} s after the end",
                      RuntimeWarning, stacklevel=2)
