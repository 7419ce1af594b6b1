"""What a trial needs: a file that is wholly written, and memory to move it through."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType

import torch

from nvmeswap.errors import SwapSpaceError
from nvmeswap.io.engine import Engine
from nvmeswap.io.probe import FolderProbe
from nvmeswap.memory.arena import Arena
from nvmeswap.memory.device_arena import DeviceArena

_FILE_NAME = "bench.swp"
_PIECE_NBYTES = 64 << 20  # arbitrary


class Memory:
    """What is written from and read into, filled with random bytes.

    `registered`: an arena as the swappers use it (on 2 MiB pages, or on the GPU that `device`
    names), to be registered with the backend; else an ordinary tensor, as most callers have.
    """

    def __init__(self, nbytes: int, *, registered: bool, device: str = "cpu") -> None:
        self.registered = registered
        self._arena = _arena(nbytes, device) if registered else None
        self.tensor = self._arena.memory if self._arena else torch.empty(nbytes, dtype=torch.uint8)
        self.tensor[: nbytes // 8 * 8].view(torch.int64).random_()
        if self.tensor.is_cuda:
            torch.cuda.current_stream().synchronize()  # the engine knows nothing of streams

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._arena is not None:
            self._arena.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TrialFile:
    """A file of `nbytes` in `folder`, written from end to end.

    By direct I/O where the folder does that, because reading what was never written is no I/O, and
    reading what is in the page cache is none either. Raises SwapSpaceError when it does not fit.
    Blocks for as long as writing takes. Whoever made the folder removes it.
    """

    def __init__(self, folder: Path, nbytes: int, probe: FolderProbe) -> None:
        self.path = folder / _FILE_NAME
        self.nbytes = nbytes
        self.probe = probe
        _allocate(self.path, nbytes)
        self._fill()
        self.drop_cache()

    def drop_cache(self) -> None:
        """Let go of the file's pages in the page cache. That takes no privilege."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _fill(self) -> None:
        piece_nbytes = min(self.nbytes, _PIECE_NBYTES)
        with Memory(piece_nbytes, registered=True) as memory, Engine(
            backend=self.probe.backend
        ) as engine:
            file = engine.open(
                self.path, offset_alignment_nbytes=self.probe.offset_alignment_nbytes,
                memory_alignment_nbytes=self.probe.memory_alignment_nbytes,
            )
            for offset in range(0, self.nbytes, piece_nbytes):
                piece = memory.tensor[: min(piece_nbytes, self.nbytes - offset)]
                engine.write(file, offset, piece).wait()
            file.close()


def _arena(nbytes: int, device: str) -> Arena | DeviceArena:
    if device == "cpu":
        return Arena(nbytes, pin_memory=False)
    return DeviceArena(nbytes, torch.device(device))


def _allocate(path: Path, nbytes: int) -> None:
    space = os.statvfs(path.parent)
    free_nbytes = space.f_bavail * space.f_frsize
    # Asked first: a filesystem may keep what it could get, to the harm of its other users.
    if nbytes > free_nbytes:
        raise _space_error(path, nbytes, free_nbytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _space_error(path, nbytes, free_nbytes, error.errno) from error
    finally:
        os.close(fd)


def _space_error(
    path: Path, nbytes: int, free_nbytes: int, code: int | None = None
) -> SwapSpaceError:
    return SwapSpaceError(
        "the trial file does not fit", path=path, wanted_nbytes=nbytes, got_nbytes=free_nbytes,
        errno=code, fix="lower --size, or free space",
    )
