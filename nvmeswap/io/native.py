"""The only importer of `nvmeswap._native`: Python values to C and back, codes to errors.

File and request handles release themselves when collected. An engine handle is closed by
`close_engine` and by nothing else.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

try:
    from nvmeswap._native import ffi, lib
except ImportError as error:
    raise ImportError(
        f"nvmeswap's engine, a C library, can't be loaded: {error}; it needs the libraries libaio "
        "and liburing, and is built by pip install nvmeswap, or in a clone by pip install -e ."
    ) from error
from nvmeswap.errors import (
    SwapCancelledError,
    SwapClosedError,
    SwapConfigError,
    SwapError,
    SwapForkError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from nvmeswap._native import EngineHandle, FileHandle, RequestHandle

    Pieces = npt.NDArray[np.uint64]
    """One row a piece: address, offset_bytes, nbytes (nvs_piece in native/interface.h)."""

_REASON_NBYTES = 256
_SLICE_S = 0.5  # arbitrary: how late a signal may be noticed

_CAUSES = {
    lib.NVS_ERROR_END_OF_FILE: "the file ends within the wanted bytes",
    lib.NVS_ERROR_NO_PROGRESS: "a transfer succeeded without moving anything",
}
MEMBER_LIMIT = int(lib.NVS_MEMBER_LIMIT)
STRIPE_LIMIT = int(lib.NVS_STRIPE_LIMIT)
_LATENCY_BUCKET_COUNT = int(lib.NVS_LATENCY_BUCKET_COUNT)


class Failure(NamedTuple):
    """How a piece of a request failed: its index, and a negative code."""

    piece: int
    status: int
    tries: int
    done_nbytes: int
    error_offset_bytes: int


def fork_error() -> SwapForkError:
    return SwapForkError(
        "this engine belongs to the parent process",
        cause=f"pid {os.getpid()} is a forked child",
        fix="open an engine of its own in the child",
    )


def closed_error(what: str) -> SwapClosedError:
    return SwapClosedError(f"{what} is closed", fix="open a new one")


def _check(code: int, what: str) -> int:
    if code >= 0:
        return code
    if code == lib.NVS_ERROR_FORKED:
        raise fork_error()
    if code == lib.NVS_ERROR_CLOSED:
        raise closed_error("the engine")
    if code == -errno.ENOMEM:
        raise MemoryError(what)
    raise SwapUsageError(what, errno=-code)


def _repeat_on_signal(call: Callable[[int], int], timeout_s: float | None) -> int:
    """`call(timeout_ns)` until it ends, but by EINTR or at the end of a slice. Python runs
    signal handlers between the tries, so that Ctrl-C ends a wait: at once where it interrupts the
    wait, and after a slice where it came just before, when nothing waited yet."""
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        code = call(int(min(left_s, _SLICE_S) * 1e9))
        is_late = code == -errno.ETIMEDOUT and left_s <= _SLICE_S
        if is_late or code not in (-errno.EINTR, -errno.ETIMEDOUT):
            return code


# --- engine --------------------------------------------------------------------------------------


def open_engine(
    *, backend: str, block_nbytes: int, background_nbytes: int, queue_depth: int,
    thread_count: int, fault_script: str | None,
) -> EngineHandle:
    """Raises SwapConfigError (errno, cause) when the backend is unknown or refused."""
    name = ffi.new("char[]", backend.encode())
    script = ffi.NULL if fault_script is None else ffi.new("char[]", fault_script.encode())
    options = ffi.new("nvs_options *", {
        "backend": name,
        "fault_script": script,
        "block_nbytes": block_nbytes,
        "background_nbytes": background_nbytes,
        "queue_depth": queue_depth,
        "thread_count": thread_count,
    })
    status = ffi.new("int32_t *")
    reason = ffi.new("char[]", _REASON_NBYTES)
    handle = lib.nvs_engine_open(options, status, reason, _REASON_NBYTES)
    if handle == ffi.NULL:
        raise SwapConfigError(
            f"the I/O backend {backend!r} could not be opened",
            errno=-status[0],
            cause=ffi.string(reason).decode(errors="replace"),
            fix='use backend "posix", which works everywhere',
        )
    return handle


def close_engine(handle: EngineHandle, timeout_s: float) -> bool:
    """Blocks until drained and freed: True. False: the time is over, the engine lives on. In a
    forked child it does nothing and says True."""
    code = _repeat_on_signal(lambda ns: lib.nvs_engine_close(handle, ns), timeout_s)
    if code in (-errno.ETIMEDOUT, lib.NVS_ERROR_FORKED):
        return code == lib.NVS_ERROR_FORKED
    _check(code, "closing the engine")
    return True


def submit(
    handle: EngineHandle, file: FileHandle, direction: int, lane: int, pieces: Pieces
) -> RequestHandle:
    request = ffi.new("nvs_request **")
    table = ffi.from_buffer("nvs_piece[]", pieces)
    code = lib.nvs_engine_submit(handle, file, direction, lane, table, len(pieces), request)
    _check(code, "submitting transfers")
    made: RequestHandle = request[0]
    return ffi.gc(made, lib.nvs_request_release)


def cancel(handle: EngineHandle, request: RequestHandle) -> None:
    _check(lib.nvs_engine_cancel(handle, request), "cancelling a request")


def register_memory(handle: EngineHandle, address: int, nbytes: int) -> int:
    """Bytes from the start that were registered: all, some or none."""
    memory = ffi.cast("void *", address)
    return _check(lib.nvs_engine_register_memory(handle, memory, nbytes), "registering memory")


def unregister_memory(handle: EngineHandle, address: int, nbytes: int) -> None:
    memory = ffi.cast("void *", address)
    _check(lib.nvs_engine_unregister_memory(handle, memory, nbytes), "unregistering memory")


def engine_counters(handle: EngineHandle) -> dict[str, int]:
    stats = ffi.new("nvs_stats *")
    _check(lib.nvs_engine_stats(handle, stats), "reading statistics")
    return {name: getattr(stats, name) for name in dir(stats)}


def gds_refusal(handle: EngineHandle) -> str | None:
    """Why cuFile is not used any more; None while it is, and without it."""
    reason = ffi.new("char[]", 2 * _REASON_NBYTES)
    code = lib.nvs_engine_gds_refusal(handle, reason, 2 * _REASON_NBYTES)
    if not _check(code, "reading a refusal"):
        return None
    return ffi.string(reason).decode(errors="replace")


def engine_latencies(handle: EngineHandle, lane: int) -> list[tuple[float, int]]:
    """(where the bucket begins, in seconds; how many requests) of each bucket that has any."""
    counts = ffi.new("uint64_t[]", _LATENCY_BUCKET_COUNT)
    _check(lib.nvs_engine_latency(handle, lane, counts), "reading latencies")
    return [
        (2.0 ** (bucket // 8) * (1 + bucket % 8 / 8) * 1e-9, counts[bucket])
        for bucket in range(_LATENCY_BUCKET_COUNT)
        if counts[bucket]
    ]


def inject(handle: EngineHandle, fault_script: str) -> None:
    _check(lib.nvs_engine_inject(handle, fault_script.encode()), "injecting a fault script")


# --- files ---------------------------------------------------------------------------------------


def new_file(
    members: Sequence[tuple[int, int]], weights: Sequence[int], stripe_nbytes: int, *,
    offset_alignment_nbytes: int, memory_alignment_nbytes: int,
) -> FileHandle:
    """Takes over the members' descriptors, each with its direct mode, unless it raises
    MemoryError."""
    handle = lib.nvs_file_new(
        ffi.new("nvs_member[]", list(members)), _Layout(weights, stripe_nbytes).stripes,
        offset_alignment_nbytes, memory_alignment_nbytes,
    )
    if handle == ffi.NULL:
        raise MemoryError("a file handle")
    return ffi.gc(handle, lib.nvs_file_release)


def release_file(handle: FileHandle) -> None:
    ffi.release(handle)


def file_mode(handle: FileHandle, member: int) -> tuple[bool, int]:
    """Whether the member is direct now, and the errno of its fallback (0: none)."""
    fallback_errno = ffi.new("int32_t *")
    is_direct = lib.nvs_file_is_direct(handle, member, fallback_errno)
    return bool(is_direct), fallback_errno[0]


class _Layout:
    """nvs_stripes, and the memory that it points to."""

    def __init__(self, weights: Sequence[int], stripe_nbytes: int) -> None:
        self._weights = ffi.new("uint32_t[]", list(weights))
        self.stripes = ffi.new("nvs_stripes *", {
            "weights": self._weights,
            "member_count": len(weights),
            "stripe_nbytes": stripe_nbytes,
        })


def stripe_share(weights: Sequence[int], stripe_nbytes: int, member: int, nbytes: int) -> int:
    layout = _Layout(weights, stripe_nbytes)
    return int(lib.nvs_stripe_share(layout.stripes, member, nbytes))


def stripe_find(
    weights: Sequence[int], stripe_nbytes: int, offset_bytes: int
) -> tuple[int, int]:
    layout = _Layout(weights, stripe_nbytes)
    member_offset = ffi.new("uint64_t *")
    member = lib.nvs_stripe_find(layout.stripes, offset_bytes, member_offset)
    return int(member), int(member_offset[0])


def probe_alignment(path: Path) -> tuple[int, int] | None:
    """(memory, offset) alignment of direct I/O as statx tells it; None when it doesn't."""
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    if lib.nvs_probe_alignment(os.fsencode(path), memory, offset) < 0:
        return None
    return memory[0], offset[0]


# --- requests ------------------------------------------------------------------------------------


def request_done(handle: RequestHandle) -> bool:
    return bool(_check(lib.nvs_request_done(handle), "asking for a request"))


def request_times_s(handle: RequestHandle) -> tuple[float, float | None]:
    """When it was submitted and when it ended (None: it has not), in `time.perf_counter` seconds:
    CPython's is CLOCK_MONOTONIC, too."""
    submitted_ns, finished_ns = ffi.new("int64_t *"), ffi.new("int64_t *")
    lib.nvs_request_times(handle, submitted_ns, finished_ns)
    return submitted_ns[0] * 1e-9, None if finished_ns[0] < 0 else finished_ns[0] * 1e-9


def wait_request(handle: RequestHandle, timeout_s: float | None) -> list[Failure] | None:
    """Blocks without the GIL. The failed pieces by index; None when the time is over."""
    out = ffi.new("uint64_t *")
    code = _repeat_on_signal(lambda ns: lib.nvs_request_wait(handle, ns, out), timeout_s)
    if code == -errno.ETIMEDOUT:
        return None
    _check(code, "waiting for a request")
    if out[0] == 0:
        return []
    table = ffi.new("nvs_failure[]", out[0])
    count = lib.nvs_request_failures(handle, table, out[0])
    return sorted(
        Failure(each.piece, each.status, each.tries, each.done_nbytes, each.error_offset_bytes)
        for each in table[0:count]
    )


def transfer_error(
    failure: Failure, *, is_write: bool, paths: Sequence[Path], member: int,
    member_offset_bytes: int, offset_bytes: int, nbytes: int, gpu_refusal: str | None,
) -> SwapError:
    """The error that a failed piece raises. Of a striped file it names the member that failed, and
    where in it. `gpu_refusal`: what cuFile or CUDA has refused, of a transfer of a GPU's memory."""
    if failure.status == lib.NVS_ERROR_CANCELLED:
        return SwapCancelledError(
            "a transfer was cancelled", path=paths[0], offset_bytes=offset_bytes,
            wanted_nbytes=nbytes, got_nbytes=failure.done_nbytes,
        )
    path = paths[member]
    code = None if failure.status in _CAUSES else -failure.status
    cause = _CAUSES.get(failure.status, "")
    cause += f"{': ' if cause else ''}at offset {failure.error_offset_bytes:_}"
    others = ""
    if len(paths) > 1:
        offset_bytes = member_offset_bytes
        cause += f" of the {len(paths)} files that are striped together"
        others = ", ".join(str(each) for each in paths if each != path)
    if failure.tries > 1:
        cause += f", after {failure.tries} tries"
    state = "`dmesg` for the drive's state"
    if gpu_refusal is not None and code == errno.EFAULT:
        cause, state = f"{cause}: {gpu_refusal}", "`nvidia-smi` for the GPU's state"
    if is_write and code in (errno.ENOSPC, errno.EDQUOT):
        return SwapSpaceError(
            f"{nbytes:_} bytes were not written: no space",
            path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
            got_nbytes=_free_nbytes(path), errno=code, cause=cause,
            intact="the source in memory" + (others and f"; {others}"),
            fix="free space on this filesystem, or raise the quota, and retry",
        )
    if is_write:
        return SwapWriteError(
            f"{nbytes:_} bytes were not written",
            path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
            got_nbytes=failure.done_nbytes, errno=code, cause=cause,
            intact="the source in memory" + (others and f"; {others}"),
            fix=f"see {state}; retry, or use another folder",
        )
    return SwapReadError(
        f"{nbytes:_} bytes were not read",
        path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
        got_nbytes=failure.done_nbytes, errno=code, cause=cause,
        intact=others or None,
        fix=f"see {state}; retry, or resume from a checkpoint"
        + (others and " without this drive"),
    )


def _free_nbytes(path: Path) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


# --- checksums -----------------------------------------------------------------------------------


def digest(address: int, nbytes: int, seed: int) -> int:
    return int(lib.nvs_digest(ffi.cast("void *", address), nbytes, seed))


def digest_pieces(pieces: Pieces) -> list[int]:
    digests = np.empty(len(pieces), np.uint64)
    lib.nvs_digest_pieces(
        ffi.from_buffer("nvs_piece[]", pieces), len(pieces),
        ffi.from_buffer("uint64_t[]", digests, require_writable=True),
    )
    sums: list[int] = digests.tolist()
    return sums


# --- masters -------------------------------------------------------------------------------------


def split_master(master: int, parameter: int, rest: int, carries: int, numel: int) -> None:
    """All addresses; see native/interface.h."""
    lib.nvs_split_master(
        ffi.cast("void *", master), ffi.cast("void *", parameter), ffi.cast("void *", rest),
        ffi.cast("uint8_t *", carries), numel,
    )


def join_master(parameter: int, rest: int, carries: int, master: int, numel: int) -> None:
    """The inverse of `split_master`."""
    lib.nvs_join_master(
        ffi.cast("void *", parameter), ffi.cast("void *", rest), ffi.cast("uint8_t *", carries),
        ffi.cast("void *", master), numel,
    )
