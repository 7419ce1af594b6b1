"""What a folder can do, found out by doing it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nvmeswap.errors import SwapConfigError, SwapIOError, SwapPathError
from nvmeswap.io import native
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.engine import Engine
from nvmeswap.io.file import DirectMode
from nvmeswap.io.filesystem import filesystem_type, warn_filesystem

# Extents start at multiples of it even where 512 would do: drives have 4096-byte sectors too.
_LAYOUT_ALIGNMENT_NBYTES = 4096
# What is assumed of memory where statx doesn't say: a page satisfies every filesystem.
_PAGE_NBYTES = 4096
# So little that torch takes no threads for it: a forked child would wait for its parent's for ever.
_TRIAL_NBYTES = 1 << 14
_TRIAL_PREFIX = ".nvmeswap-probe-"
# Best first. At 512 KiB and above all are as fast; they differ in CPU, where uring's registered
# memory and files are worth a quarter to a third of aio's, and threads cost two to three times it.
_LADDER = ("uring", "aio", "posix")
_WITHOUT_NOWAIT = {
    "uring": "would hand every transfer to a kernel worker",
    "aio": "would make every transfer within its submission, one after the other",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that was tried before the chosen one, and why it wasn't taken."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drive:
    """A folder that swap files are striped over, with its own findings. Of each row of stripes it
    gets `weight`, by the bandwidth measured there (bytes a second; None where it is alone and
    nothing was measured)."""

    folder: Path
    direct: bool
    offset_alignment_nbytes: int
    weight: int = 1
    read_nbytes_per_s: float | None = None
    write_nbytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class FolderProbe:
    """What `probe_folder` found: pass `backend` to `Engine`, the rest to `Engine.open`.

    `direct`: a direct write and read came back equal. `offset_alignment_nbytes`: for offsets and
    padded lengths, 4096 or more. `memory_alignment_nbytes`: for memory to be used in place.
    `drives`: the folder, or all of several (`probe_folders`); then `folder` is the first, `direct`
    says whether all are, and the alignments are the strictest.
    """

    folder: Path
    filesystem: str
    backend: str
    direct: bool
    offset_alignment_nbytes: int
    memory_alignment_nbytes: int
    refused: tuple[Refusal, ...]
    drives: tuple[Drive, ...]


def probe_folder(
    folder: Path, *, backend: str = "auto", direct: DirectMode = DirectMode.PREFER
) -> FolderProbe:
    """Choose backend and mode for a folder by a real aligned write and read in it.

    "auto" tries uring, aio and posix in turn, but posix alone where the filesystem can't be asked
    not to block (tmpfs): there the others are detours to a worse pool of threads. A name tries that
    one only. Leaves nothing behind, nor what a prober that was killed has left. Warns once a folder
    (`BufferedFallbackWarning`) when direct I/O is refused, at the open or later, and
    (`FilesystemWarning`) when the filesystem isn't a local disk's.

    Raises SwapPathError when the folder is missing, no folder or not writable, when direct I/O is
    REQUIRED and refused, and when no backend passes. Blocks for a few milliseconds.
    """
    with trial_file(folder) as trial_path:
        filesystem = filesystem_type(folder)
        warn_filesystem(folder, filesystem)
        told = native.probe_alignment(trial_path)
        memory_nbytes, offset_nbytes = told or (_PAGE_NBYTES, 1)
        offset_nbytes = max(offset_nbytes, _LAYOUT_ALIGNMENT_NBYTES)
        names: tuple[str, ...] = _LADDER if backend == "auto" else (backend,)
        refused: list[Refusal] = []
        if backend == "auto" and not _can_ask_not_to_block(trial_path):
            names = tuple(name for name in names if name not in _WITHOUT_NOWAIT)
            refused = [
                Refusal(name, f"on {filesystem}, which has no RWF_NOWAIT, it {effect}")
                for name, effect in _WITHOUT_NOWAIT.items()
            ]
        for name in names:
            try:
                is_direct = _try_backend(name, trial_path, direct, offset_nbytes, memory_nbytes)
            except (SwapConfigError, SwapIOError) as error:
                if direct is DirectMode.REQUIRE and error.errno == errno.EINVAL:
                    raise _direct_refused(folder, filesystem, error) from error
                refused.append(Refusal(name, _reason(name, error)))
                continue
            if not told and _takes_any_memory(name, trial_path, direct, offset_nbytes):
                memory_nbytes = 1
            return FolderProbe(folder, filesystem, name, is_direct, offset_nbytes, memory_nbytes,
                               tuple(refused), (Drive(folder, is_direct, offset_nbytes),))
    raise _none_works(folder, filesystem, backend, refused)


def _takes_any_memory(name: str, path: Path, direct: DirectMode, offset_nbytes: int) -> bool:
    """Whether memory at an odd address is moved in place: tmpfs only copies. Elsewhere it is an
    error here, or the file falls back."""
    try:
        strict = DirectMode.REQUIRE if direct is DirectMode.PREFER else direct
        return _try_backend(name, path, strict, offset_nbytes, 1, misaligned_by=1)
    except (SwapConfigError, SwapIOError):
        return False


def _try_backend(
    name: str, path: Path, direct: DirectMode, offset_nbytes: int, memory_nbytes: int,
    *, misaligned_by: int = 0,
) -> bool:
    """Whether it was direct to the end. Raises SwapConfigError or SwapIOError if it failed."""
    nbytes = max(_TRIAL_NBYTES, offset_nbytes)
    memory = torch.empty(3 * nbytes + misaligned_by, dtype=torch.uint8, device="cpu")
    start = padded_nbytes(memory.data_ptr(), nbytes) - memory.data_ptr() + misaligned_by
    written, came_back = memory[start:].narrow(0, 0, 2 * nbytes).split(nbytes)
    written.copy_(torch.arange(nbytes, device="cpu") % 251)
    came_back.fill_(0)
    block_nbytes = max(1 << 20, offset_nbytes)
    with Engine(backend=name, queue_depth=4, block_nbytes=block_nbytes) as engine:
        file = engine.open(path, direct=direct, offset_alignment_nbytes=offset_nbytes,
                           memory_alignment_nbytes=memory_nbytes)
        try:
            engine.write(file, 0, written).wait()
            engine.read(file, 0, came_back).wait()
            if not torch.equal(written, came_back):
                raise SwapIOError("the bytes read differ from those written", path=path)
            return file.direct
        finally:
            file.close()


def _can_ask_not_to_block(path: Path) -> bool:
    """Whether a transfer can be tried without blocking. io_uring and AIO start each one so."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def trial_file(folder: Path) -> Iterator[Path]:
    """A file in the folder, which proves that it is one and can be written. It is locked while its
    prober lives, so that others can tell it from one whose prober was killed."""
    _check_folder(folder)
    _remove_forgotten(folder)
    while True:
        fd, name = _create_trial_file(folder)
        try:
            # Another prober may find it before it is locked: then it is gone, or about to be.
            if not _lock(fd) and _has_locks(folder):
                continue
            if not os.fstat(fd).st_nlink:
                continue
            try:
                yield Path(name)
            finally:
                Path(name).unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


def _check_folder(folder: Path) -> None:
    try:
        facts = folder.stat()
    except OSError as error:
        raise SwapPathError(f"the folder {folder} can't be used", path=folder, errno=error.errno,
                            fix=f"create it: mkdir -p {folder}") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise SwapPathError(f"{folder} is not a folder", path=folder, errno=errno.ENOTDIR,
                            fix="name a folder, on the drive that is to be swapped to")


def _create_trial_file(folder: Path) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix=_TRIAL_PREFIX, dir=folder)
    except OSError as error:
        facts = folder.stat()
        raise SwapPathError(
            f"the folder {folder} can't be written", path=folder, errno=error.errno,
            cause=f"uid {os.geteuid()}, owner {facts.st_uid}, mode {stat.filemode(facts.st_mode)}",
            fix=f"chown {os.geteuid()} {folder}, or free space on it, or name another folder",
        ) from error


def _remove_forgotten(folder: Path) -> None:
    for path in folder.glob(f"{_TRIAL_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _has_locks(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as own:
        return _lock(own.fileno())
    return False  # full: the write that follows will say so


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else's, or a filesystem without locks
        return False
    return True


def _none_works(
    folder: Path, filesystem: str, backend: str, refused: list[Refusal]
) -> SwapPathError:
    place = f"in {folder} ({filesystem})"
    chosen = backend != "auto"
    return SwapPathError(
        f"the I/O backend {backend!r} does not work {place}" if chosen
        else f"no I/O backend works {place}",
        path=folder,
        cause="; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in refused),
        fix='set "backend" to "auto", which takes the best that works' if chosen
        else "use a folder on a local drive",
    )


def _direct_refused(
    folder: Path, filesystem: str, error: SwapConfigError | SwapIOError
) -> SwapPathError:
    return SwapPathError(
        f"direct I/O is required but refused in {folder} ({filesystem})", path=folder,
        errno=error.errno, fix='use a folder on ext4 or xfs, or direct mode "prefer"',
    )


def _reason(backend: str, error: SwapConfigError | SwapIOError) -> str:
    facts = [error.what, error.cause]
    if error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        facts.append(f"{name} ({os.strerror(error.errno)})")
    if backend == "aio" and error.errno == errno.EAGAIN:
        used, most = (Path(f"/proc/sys/fs/aio-{name}").read_text().strip()
                      for name in ("nr", "max-nr"))
        facts.append(f"fs.aio-nr is {used}, fs.aio-max-nr {most}")
    return ", ".join(fact for fact in facts if fact)
