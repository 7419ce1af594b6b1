"""Whose folder is it, and is that process still alive?

    <nvme_path>/nvmeswap/.lock                      held by whoever claims or clears folders
    <nvme_path>/nvmeswap/<run>/rank00000/owner.json locked for as long as its owner lives

With several drives each has these, and one process owns all.

Facts. flock belongs to the open file, not to the process: the kernel drops it at any death, kill -9
and power loss included; a second open in the same process is refused like anybody else's; a forked
child shares it, and would keep it alive past its parent, so children close their copies (closing
does not unlock the parent's, LOCK_UN would). Hence the lock alone says who lives; pid, boot id and
times in owner.json are for people.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from nvmeswap.errors import SwapConfigError, SwapOwnerError, SwapPathError, SwapTimeoutError

OWNER_FILE = "owner.json"
MANIFEST_FILE = "manifest.json"
_OUR_FILES = re.compile(r"[A-Za-z0-9_-]+\.swp|manifest\.(json|partial)")
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


def _try_lock(path: Path, flags: int) -> int | None:
    """Opens and locks; the descriptor, or None if somebody else holds the lock."""
    with _locked_fds_guard:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
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
def _claims_locked(root: Path, timeout_s: float) -> Iterator[None]:
    """Alone in claiming and clearing below `root`, so that no folder is seen half made."""
    deadline = time.monotonic() + timeout_s
    while (fd := _try_lock(root / ".lock", os.O_RDWR | os.O_CREAT)) is None:
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
        root = nvme_path / "nvmeswap"
        folder = root / run / f"rank{rank:05d}"
        try:
            root.mkdir(exist_ok=True)
            with _claims_locked(root, _LOCK_TIMEOUT_S):
                removed = _remove_dead(root)
                fd = _lock_own(folder)
                _write_owner(fd, run=run, rank=rank, world_size=world_size)
        except OSError as error:
            raise SwapPathError(
                "the folder for swap files can't be written",
                path=nvme_path,
                errno=error.errno,
                fix="choose a folder that this user may write, on a filesystem with locks",
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


def _remove_dead(root: Path) -> tuple[Path, ...]:
    removed: list[Path] = []
    for run_folder in _folders(root, _OUR_RUNS):
        for folder in _folders(run_folder, _OUR_RANKS):
            if _remove_if_dead(folder):
                removed.append(folder)
        _remove_if_empty(run_folder)
    return tuple(removed)


def _folders(parent: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(
            entry
            for entry in parent.iterdir()
            if names.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
        )
    except FileNotFoundError:  # its owner is just releasing it
        return []


def _remove_if_dead(folder: Path) -> bool:
    try:
        fd = _try_lock(folder / OWNER_FILE, os.O_RDWR)
    except FileNotFoundError:
        # Not ours; or empty, because its owner died before it made the file, or is releasing it.
        _remove_if_empty(folder)
        return False
    except OSError:  # another user's, or a link
        return False
    if fd is None:
        return False
    try:
        if not os.fstat(fd).st_nlink:  # released between our open and our lock
            return False
        _remove_files(folder)
    finally:
        _unlock(fd)
    return True


def _remove_files(folder: Path) -> None:
    """Removes files with our names and, if nothing is left, the folder. The owner file goes last:
    what an interrupted removal leaves is still recognised as a dead owner's."""
    with contextlib.suppress(FileNotFoundError):  # somebody else cleared it too
        for entry in folder.iterdir():
            if _OUR_FILES.fullmatch(entry.name) and not entry.is_dir():
                entry.unlink()
        (folder / OWNER_FILE).unlink()
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # not empty: something foreign, or somebody else's rank, is in it
        return False
    return True


def _lock_own(folder: Path) -> int:
    """Makes and locks. A neighbour that releases takes no claims lock, so its folders, or the owner
    file that we have just opened, may go between two of our calls: then again."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = _try_lock(folder / OWNER_FILE, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue
        if fd is None:
            raise SwapOwnerError(
                f"run and rank are in use by another live owner: {_owner_text(folder)}",
                path=folder,
                fix="give each job its own run name, or stop the other one",
            )
        if os.fstat(fd).st_nlink:
            return fd
        _unlock(fd)


def _owner_text(folder: Path) -> str:
    try:
        return (folder / OWNER_FILE).read_text()
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
            _remove_files(folder)
            _remove_if_empty(folder.parent)
    finally:
        _unlock(fd)
