"""`aio_handle`: DeepSpeed's engine API, on our engine.

Same names, keywords and return values. Where DeepSpeed returns -1, aborts, or reports success for
what did not happen, this raises a `SwapError`; docs/howto/deepspeed_engine.md has the list.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from pathlib import Path

import torch

from nvmeswap.deepspeed.files import (
    EngineSize,
    FolderFacts,
    Target,
    created,
    engines,
    find,
    path_of,
    take_space,
)
from nvmeswap.deepspeed.operation import Operation, require_tensor
from nvmeswap.deepspeed.pinned import pin_handle, pinned_memory
from nvmeswap.errors import SwapError, SwapForkError, SwapReadError, SwapUsageError
from nvmeswap.io import Direction, Engine

_SECTOR_NBYTES = 512
_ENDLESS = 1 << 63

FileName = str | os.PathLike[str]
Pending = dict[tuple[int, int], list[Operation]]  # by device and inode


class aio_handle:
    """Reads and writes whole tensors, in the background if wished.

    Args: `block_size` in bytes, the largest single transfer; `queue_depth` times
    `intra_op_parallelism`, how many of them are in flight; `single_submit`, `overlap_events`: kept
    for their getters, our engine always does what is faster.

    A write creates its file (mode 0600) and extends it where needed. Without `file_offset` it is
    the whole file, which ends with it; with one, 0 too, it changes those bytes alone. Of what
    overlaps in one file, reads and writes take effect in the order of the calls. Buffers may be any
    dense tensor; page-locked ones from `new_cpu_locked_tensor` are the fastest.

    Raises, every transfer: SwapPathError (the file can't be opened), SwapSpaceError (no space is
    left; known at the call wherever the filesystem tells), SwapReadError (the file ends within the
    wanted bytes, known at the call), SwapUsageError, SwapForkError in a forked child. Of an `async`
    transfer that fails later the error is raised by `wait`.
    Threads: any. Ownership: of a buffer until `wait`; a read's must not be used until then, nor a
    write's changed. A handle that is dropped waits for what is under way, and warns of failures.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        for name, number in (("block_size", block_size), ("queue_depth", queue_depth),
                             ("intra_op_parallelism", intra_op_parallelism)):
            if not isinstance(number, int) or number < 1:
                raise SwapUsageError(f"{name} is {number!r}", fix="use a number above 0")
        for name, flag in (("single_submit", single_submit), ("overlap_events", overlap_events)):
            if not isinstance(flag, int):
                raise SwapUsageError(f"{name} is {flag!r}", fix="use True or False")
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = intra_op_parallelism
        self._size = EngineSize.of(block_size, queue_depth, intra_op_parallelism)
        self._engines: dict[str, Engine] = {}  # by backend, held for as long as the handle
        self._pending: Pending = {}
        self._lock = threading.Lock()  # of starting, so that order is the order of the calls
        self._pid = os.getpid()
        weakref.finalize(self, _drain, self._pending, self._engines, self._pid)

    def get_block_size(self) -> int:
        """As given, in bytes."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """As given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """As given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """What DeepSpeed pads to, in bytes; here any length and offset works."""
        return self._intra_op_parallelism * _SECTOR_NBYTES

    # --- page-locked memory ----------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """See `pin_handle.new_cpu_locked_tensor`; the keyword is spelt as in DeepSpeed."""
        return pinned_memory.allocate(num_elem, example_tenosr.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """See `pin_handle.free_cpu_locked_tensor`."""
        return pinned_memory.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """See `pin_handle.is_pinned`."""
        return pin_handle().is_pinned(buffer)

    # --- transfers -------------------------------------------------------------------------------

    def read(
        self, buffer: torch.Tensor, filename: FileName, validate: bool,
        file_offset: int | None = None,
    ) -> int:
        """Fill the buffer and return 0; `validate`: compare with the file afterwards."""
        self._read(buffer, filename, validate, False, file_offset)
        return 0

    def write(
        self, buffer: torch.Tensor, filename: FileName, validate: bool,
        file_offset: int | None = None,
    ) -> int:
        """Write the buffer and return 0; `validate`: read it back and compare."""
        self._write(buffer, Path(filename), validate, False, file_offset)
        return 0

    def pread(
        self, buffer: torch.Tensor, filename: FileName, validate: bool,
        async_: bool | None = None, file_offset: int | None = None, **keywords: bool,
    ) -> int:
        """Fill the buffer and return 1; with `async` (by place, or in `**{"async": True}`) start it
        and return 0."""
        return self._read(buffer, filename, validate, _async(async_, keywords), file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: FileName, validate: bool,
        async_: bool | None = None, file_offset: int | None = None, **keywords: bool,
    ) -> int:
        """Write the buffer and return 1; with `async` start it and return 0."""
        return self._write(buffer, Path(filename), validate, _async(async_, keywords), file_offset)

    def sync_pread(
        self, buffer: torch.Tensor, filename: FileName, file_offset: int | None = None
    ) -> int:
        """Fill the buffer and return 1. Waits for nothing else."""
        return self._read(buffer, filename, False, False, file_offset)

    def sync_pwrite(
        self, buffer: torch.Tensor, filename: FileName, file_offset: int | None = None
    ) -> int:
        """Write the buffer and return 1. Waits for nothing else."""
        return self._write(buffer, Path(filename), False, False, file_offset)

    def async_pread(
        self, buffer: torch.Tensor, filename: FileName, file_offset: int | None = None
    ) -> int:
        """Start filling the buffer and return 0."""
        return self._read(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: FileName | int | None = None,
        file_offset: int | None = None, *, fd: int | None = None,
    ) -> int:
        """Start writing the buffer and return 0. A descriptor in place of the name writes to its
        file, which is never shortened; it may be closed at once."""
        if filename is None:
            filename = fd
        if filename is None:
            raise TypeError("async_pwrite needs a filename or a fd")
        if isinstance(filename, int):
            return self._write(buffer, path_of(filename), False, True, file_offset or 0)
        return self._write(buffer, Path(filename), False, True, file_offset)

    def wait(self) -> int:
        """Block until all `async` transfers are over, and return their number; 0 if there are none.

        Raises the first one's error when any failed (all are over then, and forgotten), or
        SwapTimeoutError when a transfer stands still (then all go on, and may be waited for).
        """
        self._require_own_process()
        with self._lock:
            pending = _all(self._pending)
        for operation in pending:
            operation.settle()
        with self._lock:
            ours = [each for each in pending if self._forget(each) and each.counted]
        for operation in ours:
            if operation.error is not None:
                raise operation.error
        return len(ours)

    def _read(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, is_async: bool,
        file_offset: int | None,
    ) -> int:
        begin = self._check(buffer, file_offset)
        end = begin + buffer.nbytes
        with self._lock:
            target = find(Path(filename))
            if end > target.nbytes:
                raise SwapReadError(
                    f"{buffer.nbytes:_} bytes were not read: the file ends within them",
                    path=target.path, offset_bytes=begin, wanted_nbytes=buffer.nbytes,
                    got_nbytes=max(target.nbytes - begin, 0), intact="the buffer",
                    fix="read no more than was written",
                )
            self._settle_overlapping(target, begin, end, Direction.READ)
            operation = self._start(Direction.READ, target, begin, buffer, validate, is_async)
        return 0 if is_async else self._finish(operation)

    def _write(
        self, buffer: torch.Tensor, path: Path, validate: bool, is_async: bool,
        file_offset: int | None,
    ) -> int:
        begin = self._check(buffer, file_offset)
        end = begin + buffer.nbytes
        whole = file_offset is None
        with self._lock, created(path) as (fd, target):
            self._settle_overlapping(target, begin, _ENDLESS if whole else end, Direction.WRITE)
            take_space(fd, target, begin, end, whole=whole)
            operation = self._start(Direction.WRITE, target, begin, buffer, validate, is_async)
        return 0 if is_async else self._finish(operation)

    def _check(self, buffer: torch.Tensor, file_offset: int | None) -> int:
        self._require_own_process()
        require_tensor(buffer)
        begin = file_offset or 0
        if not 0 <= begin < _ENDLESS - buffer.nbytes:
            raise SwapUsageError(f"file_offset is {file_offset}", fix="use bytes from the start")
        return begin

    def _start(
        self, direction: Direction, target: Target, begin: int, buffer: torch.Tensor,
        validate: bool, is_async: bool,
    ) -> Operation:
        facts = target.facts()
        engine = self._engine(facts)
        operation = Operation(direction, target, begin, buffer, engine, facts,
                              validate=validate, counted=is_async)
        self._pending.setdefault(operation.file, []).append(operation)
        return operation

    def _engine(self, facts: FolderFacts) -> Engine:
        if facts.backend not in self._engines:
            self._engines[facts.backend] = engines.get(facts.backend, self._size)
        return self._engines[facts.backend]

    def _settle_overlapping(
        self, target: Target, begin: int, end: int, direction: Direction
    ) -> None:
        for operation in self._pending.get(target.identity, ()):
            if operation.overlaps(begin, end, direction):
                operation.settle()

    def _finish(self, operation: Operation) -> int:
        operation.settle()
        with self._lock:
            self._forget(operation)
        if operation.error is not None:
            raise operation.error
        return 1

    def _forget(self, operation: Operation) -> bool:
        """Whether it was still pending."""
        of_file = self._pending.get(operation.file, [])
        if operation not in of_file:
            return False
        of_file.remove(operation)
        if not of_file:
            del self._pending[operation.file]
        return True

    def _require_own_process(self) -> None:
        # Before any lock: in a child it may have been copied while a thread of the parent held it.
        if os.getpid() != self._pid:
            raise SwapForkError("this handle belongs to the parent process",
                                cause=f"pid {os.getpid()} is a forked child",
                                fix="make a handle in the child")


def _all(pending: Pending) -> list[Operation]:
    return [operation for of_file in pending.values() for operation in of_file]


def _async(by_place: bool | None, keywords: dict[str, bool]) -> bool:
    """The argument that Python can't name."""
    named = keywords.pop("async", by_place)
    if keywords or named is None:
        raise TypeError(f"unexpected keywords: {', '.join(keywords)}" if keywords
                        else "the argument 'async' is missing")
    return bool(named)


def _drain(pending: Pending, engines_held: dict[str, Engine], pid: int) -> None:
    """When a handle is dropped, and at exit."""
    if os.getpid() != pid:
        return
    for operation in _all(pending):
        try:
            operation.settle()
        except SwapError as error:
            operation.error = error
        if operation.error is not None:
            warnings.warn(f"nobody waited for a transfer that failed: {operation.error}",
                          RuntimeWarning, stacklevel=2)
    engines_held.clear()
