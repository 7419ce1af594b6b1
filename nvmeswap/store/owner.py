"""Whose folder is it, and is that process still alive?

    <nvme_path>/nvmeswap/.lock                      held by whoever claims or clears folders
    <nvme_path>/nvmeswap/<run>/rank00000/owner.json locked for as long as its owner lives

With several drives each has these, and one process owns all.

Facts. flock belongs to the open file, not to the process: the kernel drops it at any death, kill -9
and power loss included; a second open in the same process is refused like anybody else's; a forked
child shares it, and would keep it alive past its parent, so children close their copies (closing
does not unlock the parent's, LOCK_UN would). Hence the lock alone says who lives; pid, boot id and
times in owner.json are for people.

The files hold weights, and clearing deletes: so folders are 0700 and files 0600 whatever the umask,
no link is followed, no folder of another user or on another mount entered, and names are resolved
within descriptors of the folders above, so that a folder replaced meanwhile leads nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nvmeswap.errors import SwapConfigError, SwapOwnerError, SwapPathError, SwapTimeoutError

_ROOT = "nvmeswap"
OWNER_FILE = "owner.json"
MANIFEST_FILE = "manifest.json"
SIDECAR_FILE = "nvmeswap_optimizer.json"  # what a copy of the folder needs to be a checkpoint
_OUR_FILES = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.swp|(manifest|nvmeswap_optimizer)\.(json|partial)"
)
_OUR_RUNS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OUR_RANKS = re.compile(r"rank\d{5,}")
_LOCK_TIMEOUT_S = 300.0  # a neighbour may be deleting a terabyte: 1 s for 10 GB with discard
_LOCK_POLL_S = 0.01

_locked_fds: set[int] = set()
# Re-entrant: the garbage collector may drop an owner, which unlocks, while this thread locks.
_locked_fds_guard = threading.RLock()


def _close_in_child() -> None:
    for fd in _locked_fds:
        os.close(fd)
    _locked_fds.clear()
    _locked_fds_guard.release()


os.register_at_fork(
    before=_locked_fds_guard.acquire,
    after_in_parent=_locked_fds_guard.release,
    after_in_child=_close_in_child,
)


def _try_lock(name: str, flags: int, *, folder_fd: int) -> int | None:
    """Opens and locks; the descriptor, or None if somebody else holds the lock."""
    with _locked_fds_guard:
        fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        _locked_fds.add(fd)
        return fd


def _unlock(fd: int) -> None:
    with _locked_fds_guard:
        _locked_fds.discard(fd)
        os.close(fd)


@contextlib.contextmanager
def _claims_locked(root: Path, root_fd: int, timeout_s: float) -> Iterator[None]:
    """Alone in claiming and clearing below `root`, so that no folder is seen half made."""
    deadline = time.monotonic() + timeout_s
    while (fd := _try_lock(".lock", os.O_RDWR | os.O_CREAT, folder_fd=root_fd)) is None:
        if time.monotonic() >= deadline:
            raise SwapTimeoutError(
                "another process is claiming or clearing swap folders and does not finish",
                path=root / ".lock",
                fix="`fuser` on that file tells who it is",
            )
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        _unlock(fd)


@contextlib.contextmanager
def _opened(folder: str | Path, *, parent_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a folder; within `parent_fd` of nothing but a real one, on the same mount.
    Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    flags |= 0 if parent_fd is None else os.O_NOFOLLOW
    fd = os.open(folder, flags, dir_fd=parent_fd)
    try:
        if parent_fd is not None and _mount_of(fd) != _mount_of(parent_fd):
            raise OSError(errno.EXDEV, "it is a mount point", str(folder))
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _made(folder: str, *, parent_fd: int) -> Iterator[int]:
    """The same for a folder of ours, made where it is missing, that nobody else may enter."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700, dir_fd=parent_fd)
    with _opened(folder, parent_fd=parent_fd) as fd:
        facts = os.fstat(fd)
        if facts.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to uid {facts.st_uid}", folder)
        if facts.st_mode & 0o077:
            os.fchmod(fd, 0o700)
        yield fd


def _mount_of(fd: int) -> str:
    """Tells mounts apart that show the same filesystem (bind mounts), which st_dev does not."""
    facts = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return facts.partition("mnt_id:")[2].split("\n")[0]


class OwnedFolder:
    """One rank's folder, ours until `release`, until this process dies or exits, or until the
    object is dropped; the last three remove it (after kill -9, the next start does).

    Attributes: `folder`; `removed`, the folders of dead owners that claiming this one removed.
    Threads: all calls from any thread. In a forked child every call does nothing.
    """

    def __init__(self, folder: Path, fd: int, removed: tuple[Path, ...]) -> None:
        self.folder = folder
        self.removed = removed
        self._give_up = weakref.finalize(self, _release, folder, fd, os.getpid(), True)

    @classmethod
    def claim(cls, nvme_path: Path, *, run: str, rank: int, world_size: int) -> OwnedFolder:
        """Makes `<nvme_path>/nvmeswap/<run>/rank00000`, empty and locked. First removes the folders
        of dead owners below `nvme_path`, of any run; live ones and foreign files stay.

        Raises SwapPathError (no such folder, not a folder, not writable), SwapConfigError (a run
        name that can't name a folder), SwapOwnerError (run and rank are in use by a live process),
        SwapTimeoutError. Blocks while another process claims or clears.
        """
        if not _OUR_RUNS.fullmatch(run):
            raise SwapConfigError(
                f"the run name {run!r} can't name a folder",
                key="run",
                fix="letters, digits, dots, dashes and underscores; at most 128",
            )
        _check_folder(nvme_path)
        root = nvme_path / _ROOT
        folder = root / run / f"rank{rank:05d}"
        try:
            with (
                _opened(nvme_path) as nvme_fd,
                _made(_ROOT, parent_fd=nvme_fd) as root_fd,
                _claims_locked(root, root_fd, _LOCK_TIMEOUT_S),
            ):
                removed = tuple(root / each for each in _remove_dead(root_fd))
                fd = _lock_own(folder, root_fd)
                _write_owner(fd, run=run, rank=rank, world_size=world_size)
        except OSError as error:
            raise SwapPathError(
                "the folder for swap files can't be written",
                path=nvme_path,
                errno=error.errno,
                cause=f"{error.filename}: {error.strerror}" if error.filename else None,
                fix="choose a folder that this user may write, on a filesystem with locks; nothing "
                f"but {_ROOT}'s own folders may be in {root}",
            ) from error
        return cls(folder, fd, removed)

    def release(self, *, remove: bool = True) -> None:
        """Gives the folder up; calling again does nothing. With `remove` our files go at once, and
        the folder if nothing foreign is in it; without, they stay until the next claim. Blocks."""
        if arguments := self._give_up.detach():
            folder, fd, pid, _ = arguments[2]
            _release(folder, fd, pid, remove)


class OwnedFolders:
    """An `OwnedFolder` of the same name on each of several drives.

    Attributes: `folder`, the first; `folders`, all; `removed`, as an `OwnedFolder`'s.
    """

    def __init__(self, owned: Sequence[OwnedFolder]) -> None:
        self.folder = owned[0].folder
        self.folders = tuple(each.folder for each in owned)
        self.removed = tuple(folder for each in owned for folder in each.removed)
        self._owned = tuple(owned)

    @classmethod
    def claim(
        cls, nvme_paths: Sequence[Path], *, run: str, rank: int, world_size: int
    ) -> OwnedFolders:
        """Claims below each path, one after the other, as `OwnedFolder.claim`; all or none."""
        owned: list[OwnedFolder] = []
        try:
            for path in nvme_paths:
                owned.append(OwnedFolder.claim(path, run=run, rank=rank, world_size=world_size))
        except BaseException:
            for each in owned:
                each.release()
            raise
        return cls(owned)

    def release(self, *, remove: bool = True) -> None:
        """As `OwnedFolder.release`, of each, also when one fails: a drive that is gone must not
        leave its neighbours full. Raises SwapPathError naming the last that failed."""
        failed: SwapPathError | None = None
        for each in self._owned:
            try:
                each.release(remove=remove)
            except OSError as error:
                failed = SwapPathError(
                    "swap files could not be removed", path=each.folder, errno=error.errno,
                    fix="see `dmesg` for the drive's state; the next start there removes them",
                )
        if failed is not None:
            raise failed


@dataclass(frozen=True, slots=True)
class RankFolder:
    """A rank's folder as somebody else sees it. `pid` is what its owner wrote, None if that can't
    be read; `alive` says the lock; `nbytes` are those of the swap files."""

    folder: Path
    pid: int | None
    alive: bool
    nbytes: int


def look_at_owners(nvme_path: Path) -> list[RankFolder]:
    """All rank folders of this user below `nvme_path`. Changes nothing; what can't be looked into
    is left out. A claim that looks at the same moment may take a dead owner for a live one, and
    leaves its folder to the next."""
    found: list[RankFolder] = []
    with contextlib.suppress(OSError), _opened(nvme_path / _ROOT) as root_fd:
        for run in _names(root_fd, _OUR_RUNS):
            with contextlib.suppress(OSError), _opened(run, parent_fd=root_fd) as run_fd:
                for rank in _names(run_fd, _OUR_RANKS):
                    with contextlib.suppress(OSError), _opened(rank, parent_fd=run_fd) as fd:
                        found.append(_look_at(nvme_path / _ROOT / run / rank, fd))
    return found


def _look_at(folder: Path, folder_fd: int) -> RankFolder:
    lock = _try_lock(OWNER_FILE, os.O_RDONLY, folder_fd=folder_fd)
    if lock is not None:
        _unlock(lock)
    try:
        pid = int(json.loads(_owner_text(folder_fd))["pid"])
    except (ValueError, KeyError, TypeError):
        pid = None
    nbytes = sum(
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_size
        for name in _names(folder_fd, _OUR_FILES)
    )
    return RankFolder(folder, pid, alive=lock is None, nbytes=nbytes)


def _check_folder(nvme_path: Path) -> None:
    if not nvme_path.exists():
        raise SwapPathError(
            "the folder for swap files does not exist", path=nvme_path, fix="create it, or mount it"
        )
    if not nvme_path.is_dir():
        raise SwapPathError(
            "the place for swap files is not a folder", path=nvme_path, fix="name a folder"
        )
    if not os.access(nvme_path, os.W_OK | os.X_OK):
        raise SwapPathError(
            "the folder for swap files is not writable",
            path=nvme_path,
            fix=f"make it writable for user id {os.geteuid()}, or mount it read-write",
        )


def _remove_dead(root_fd: int) -> list[str]:
    """The folders removed, as <run>/<rank>."""
    removed: list[str] = []
    for run in _names(root_fd, _OUR_RUNS):
        with contextlib.suppress(OSError), _opened(run, parent_fd=root_fd) as run_fd:
            removed += [
                f"{run}/{rank}"
                for rank in _names(run_fd, _OUR_RANKS)
                if _remove_if_dead(rank, run_fd)
            ]
        _remove_if_empty(run, root_fd)
    return removed


def _names(folder_fd: int, pattern: re.Pattern[str]) -> list[str]:
    return sorted(name for name in os.listdir(folder_fd) if pattern.fullmatch(name))


def _remove_if_dead(rank: str, run_fd: int) -> bool:
    try:
        with _opened(rank, parent_fd=run_fd) as folder_fd:
            was_dead = _clear_if_dead(folder_fd)
    except FileNotFoundError:
        # Not ours; or empty, because its owner died before it made the file, or is releasing it.
        was_dead = False
    except OSError:  # a link, a mount point, or another user's
        return False
    _remove_if_empty(rank, run_fd)
    return was_dead


def _clear_if_dead(folder_fd: int) -> bool:
    """Removes a dead owner's files; False if the owner lives. Raises FileNotFoundError if nobody
    owns the folder, OSError if the owner file is not one of ours."""
    fd = _try_lock(OWNER_FILE, os.O_RDWR, folder_fd=folder_fd)
    if fd is None:
        return False
    try:
        facts = os.fstat(fd)
        if not facts.st_nlink:  # released between our open and our lock
            raise FileNotFoundError(errno.ENOENT, "it was released", OWNER_FILE)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", OWNER_FILE)
        _remove_files(folder_fd)
    finally:
        _unlock(fd)
    return True


def _remove_files(folder_fd: int) -> None:
    """Removes files with our names. The owner file goes last: what an interrupted removal leaves is
    still recognised as a dead owner's."""
    for name in [*_names(folder_fd, _OUR_FILES), OWNER_FILE]:
        with contextlib.suppress(FileNotFoundError):  # somebody else cleared it too
            if stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder_fd)


def _remove_if_empty(name: str, parent_fd: int) -> None:
    with contextlib.suppress(OSError):  # something foreign, or somebody else's rank, is in it
        os.rmdir(name, dir_fd=parent_fd)


def _lock_own(folder: Path, root_fd: int) -> int:
    """Makes and locks. A neighbour that releases takes no claims lock, so its folders, or its owner
    file, may go between two of our calls: then again. An owner file that is there already is never
    written to: it may be a link to what is not ours."""
    while os.fstat(root_fd).st_nlink:
        try:
            with (
                _made(folder.parent.name, parent_fd=root_fd) as run_fd,
                _made(folder.name, parent_fd=run_fd) as folder_fd,
            ):
                try:
                    fd = _try_lock(
                        OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder_fd=folder_fd
                    )
                except FileExistsError:
                    if _clear_if_dead(folder_fd):
                        continue
                    raise SwapOwnerError(
                        "run and rank are in use by another live owner: "
                        f"{_owner_text(folder_fd)}",
                        path=folder,
                        fix="give each job its own run name, or stop the other one",
                    ) from None
                assert fd is not None, "only who holds the claims lock locks another's owner file"
                return fd
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", str(folder.parent.parent))


def _owner_text(folder_fd: int) -> str:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(OWNER_FILE, flags, dir_fd=folder_fd)) as file:
            return file.read()
    except OSError:
        return "unknown"


def _write_owner(fd: int, *, run: str, rank: int, world_size: int) -> None:
    owner = {
        "pid": os.getpid(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "start_time_s": psutil.Process().create_time(),
        "rank": rank,
        "world_size": world_size,
        "run": run,
    }
    try:
        os.write(fd, json.dumps(owner).encode())
    except OSError:
        _unlock(fd)
        raise


def _release(folder: Path, fd: int, owner_pid: int, remove: bool) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: its descriptor was closed at birth, and the files are not its own
    try:
        if remove:
            _remove_own(folder, fd)
    finally:
        _unlock(fd)


def _remove_own(folder: Path, owner_fd: int) -> None:
    """By path, and only if what is there now is the folder that was claimed."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        _opened(folder.parent.parent) as root_fd,
        _opened(folder.parent.name, parent_fd=root_fd) as run_fd,
    ):
        with _opened(folder.name, parent_fd=run_fd) as folder_fd:
            there = os.stat(OWNER_FILE, dir_fd=folder_fd, follow_symlinks=False)
            if not os.path.samestat(there, os.fstat(owner_fd)):
                return
            _remove_files(folder_fd)
        _remove_if_empty(folder.name, run_fd)
        _remove_if_empty(folder.parent.name, root_fd)
