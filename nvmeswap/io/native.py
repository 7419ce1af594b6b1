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

from nvmeswap._native import ffi, lib
from nvmeswap.errors import (
    SwapClosedError,
    SwapConfigError,
    SwapError,
    SwapForkError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.stats import EngineStats

if TYPE_CHECKING:
    from nvmeswap._native import EngineHandle, FileHandle, RequestHandle
    from nvmeswap.io.transfer import Transfer

_REASON_NBYTES = 256
_FOREVER_NS = -1

_CAUSES = {
    lib.NVS_ERROR_END_OF_FILE: "the file ends within the wanted bytes",
    lib.NVS_ERROR_NO_PROGRESS: "a transfer succeeded without moving anything",
}


class Result(NamedTuple):
    """How a request ended: status 0, or a negative code."""

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
    """`call(timeout_ns)` until it ends otherwise than by EINTR. Python runs signal handlers between
    the tries, so that Ctrl-C ends a wait."""
    if timeout_s is None:
        while (code := call(_FOREVER_NS)) == -errno.EINTR:
            pass
        return code
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        code = call(min(int(left_s * 1e9), 1 << 62))
        if code != -errno.EINTR:
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


def submit(handle: EngineHandle, transfers: Sequence[Transfer], lane: int) -> list[RequestHandle]:
    count = len(transfers)
    table = ffi.new("nvs_transfer[]", count)
    requests = ffi.new("nvs_request *[]", count)
    for entry, transfer in zip(table, transfers, strict=True):
        buffer = transfer.buffer
        entry.file = transfer.file.handle
        entry.memory = ffi.cast("void *", buffer.data_ptr())
        entry.offset_bytes = transfer.offset_bytes
        entry.nbytes = buffer.nbytes
        entry.direction = transfer.direction
    _check(lib.nvs_engine_submit(handle, table, count, lane, requests), "submitting transfers")
    return [ffi.gc(request, lib.nvs_request_release) for request in requests]


def register_memory(handle: EngineHandle, address: int, nbytes: int) -> int:
    """Bytes from the start that were registered: all, some or none."""
    memory = ffi.cast("void *", address)
    return _check(lib.nvs_engine_register_memory(handle, memory, nbytes), "registering memory")


def unregister_memory(handle: EngineHandle, address: int, nbytes: int) -> None:
    memory = ffi.cast("void *", address)
    _check(lib.nvs_engine_unregister_memory(handle, memory, nbytes), "unregistering memory")


def engine_stats(handle: EngineHandle) -> EngineStats:
    stats = ffi.new("nvs_stats *")
    _check(lib.nvs_engine_stats(handle, stats), "reading statistics")
    return EngineStats(**{name: getattr(stats, name) for name in EngineStats.__dataclass_fields__})


def inject(handle: EngineHandle, fault_script: str) -> None:
    _check(lib.nvs_engine_inject(handle, fault_script.encode()), "injecting a fault script")


# --- files ---------------------------------------------------------------------------------------


def new_file(
    fd: int, *, direct_mode: int, offset_alignment_nbytes: int, memory_alignment_nbytes: int
) -> FileHandle:
    """Takes over the descriptor, also when it raises MemoryError."""
    handle = lib.nvs_file_new(fd, direct_mode, offset_alignment_nbytes, memory_alignment_nbytes)
    if handle == ffi.NULL:
        os.close(fd)
        raise MemoryError("a file handle")
    return ffi.gc(handle, lib.nvs_file_release)


def release_file(handle: FileHandle) -> None:
    ffi.release(handle)


def file_mode(handle: FileHandle) -> tuple[bool, int]:
    """Whether the file is direct now, and the errno of its fallback (0: none)."""
    fallback_errno = ffi.new("int32_t *")
    is_direct = lib.nvs_file_is_direct(handle, fallback_errno)
    return bool(is_direct), fallback_errno[0]


def probe_alignment(path: Path) -> tuple[int, int] | None:
    """(memory, offset) alignment of direct I/O as statx tells it; None when it doesn't."""
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    if lib.nvs_probe_alignment(os.fsencode(path), memory, offset) < 0:
        return None
    return memory[0], offset[0]


# --- requests ------------------------------------------------------------------------------------


def request_done(handle: RequestHandle) -> bool:
    return bool(_check(lib.nvs_request_done(handle), "asking for a request"))


def wait_request(handle: RequestHandle, timeout_s: float | None) -> Result | None:
    """Blocks without the GIL; None when the time is over."""
    out = ffi.new("nvs_result *")
    code = _repeat_on_signal(lambda ns: lib.nvs_request_wait(handle, ns, out), timeout_s)
    if code == -errno.ETIMEDOUT:
        return None
    _check(code, "waiting for a request")
    return Result(out.status, out.tries, out.done_nbytes, out.error_offset_bytes)


def transfer_error(
    result: Result, *, is_write: bool, path: Path, offset_bytes: int, nbytes: int
) -> SwapError:
    """The error that a failed request raises."""
    code = None if result.status in _CAUSES else -result.status
    cause = _CAUSES.get(result.status, "")
    cause += f"{': ' if cause else ''}at offset {result.error_offset_bytes:_}"
    if result.tries > 1:
        cause += f" after {result.tries} tries"
    if is_write and code in (errno.ENOSPC, errno.EDQUOT):
        return SwapSpaceError(
            f"{nbytes:_} bytes were not written: no space",
            path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
            got_nbytes=_free_nbytes(path), errno=code, cause=cause,
            intact="the source in memory",
            fix="free space on this filesystem, or raise the quota, and retry",
        )
    if is_write:
        return SwapWriteError(
            f"{nbytes:_} bytes were not written",
            path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
            got_nbytes=result.done_nbytes, errno=code, cause=cause,
            intact="the source in memory",
            fix="see `dmesg` for the drive's state; retry, or use another folder",
        )
    return SwapReadError(
        f"{nbytes:_} bytes were not read",
        path=path, offset_bytes=offset_bytes, wanted_nbytes=nbytes,
        got_nbytes=result.done_nbytes, errno=code, cause=cause,
        fix="see `dmesg` for the drive's state; retry, or resume from a checkpoint",
    )


def _free_nbytes(path: Path) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
