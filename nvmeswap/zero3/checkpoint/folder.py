"""A folder of checkpoints, as one process (rank 0) sees and changes it.

    <folder>/step-00000010/            complete: its name is given last, by a rename
      complete.json                    the marker: what it is, and the sizes of its files
      .metadata, __0_00000_0.distcp    torch.distributed.checkpoint's
    <folder>/.step-00000020.1f2e3d4c.partial/    being written, or left by a killed save
    <folder>/.lock                     held by whoever saves

A step that is saved again gets a name of its own (step-00000010.2), and the older one is removed
when the new one is complete. Later saves have larger serials, whatever their step: after going back
to an earlier step, the newest is not the one with the largest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvmeswap.errors import SwapOwnerError, SwapPathError, SwapSpaceError, SwapWriteError

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFT_BEHIND = re.compile(r"\.step-\d{8,}(\.\d+)?\.[0-9a-f]{8}\.(partial|removed)")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
log = logging.getLogger("nvmeswap.checkpoint")


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint; `info` is what its marker says."""

    path: Path
    step: int
    serial: int
    info: Mapping[str, Any]


def latest(folder: str | Path) -> Path | None:
    """The checkpoint that was completed last, or None. Incomplete ones are never taken.

    It says what this process sees; `load` and `save` ask rank 0. Raises SwapPathError for a folder
    that can't be read.
    """
    saved = complete_ones(Path(folder))
    return saved[-1].path if saved else None


def complete_ones(folder: Path) -> list[Saved]:
    """All complete checkpoints of a folder, in the order in which they were completed."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SwapPathError("checkpoints can't be looked for", path=folder, errno=error.errno,
                            fix="name a folder that you may read") from error
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        info = _marker(folder / name) if match else None
        if match and info is not None:
            found.append(Saved(folder / name, int(match[1]), int(info["serial"]), info))
    return sorted(found, key=lambda saved: saved.serial)


def _marker(path: Path) -> dict[str, Any] | None:
    try:
        info = json.loads((path / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) and "serial" in info else None


class Writing:
    """A checkpoint that is being written; for rank 0. Everybody writes into `partial`.

    What killed saves left in the folder is removed first, under a lock that the kernel drops with
    the process that holds it. Raises SwapOwnerError (somebody else saves there), SwapPathError,
    SwapSpaceError, SwapWriteError. Call `complete` or `abandon`.
    """

    def __init__(self, folder: Path, step: int | None) -> None:
        self.folder = folder.absolute()  # a later chdir: no matter
        self._lock_fd = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock():
                self._clean()
            existing = complete_ones(self.folder)
            self._serial = existing[-1].serial + 1 if existing else 1
            self.step = existing[-1].step + 1 if step is None and existing else step or 0
            self._replaced = [saved.path for saved in existing if saved.step == self.step]
            self.path = self.folder / self._free_name()
            self.partial = self.folder / f".{self.path.name}.{secrets.token_hex(4)}.partial"
            self.partial.mkdir()
        except OSError as error:
            self._unlock()
            raise written_badly(error, self.folder) from error
        except BaseException:
            self._unlock()
            raise

    def complete(self, info: Mapping[str, Any], files: Mapping[str, int], keep: int | None) -> None:
        """Make it the latest; once this returns, it survives a loss of power. `files`: the sizes
        that the ranks wrote, by name; `keep`: how many older ones stay."""
        try:
            self._check(files)
            content = {**info, "step": self.step, "serial": self._serial, "files": dict(files)}
            with open(self.partial / MARKER, "x") as marker:
                json.dump(content, marker)
                marker.flush()
                os.fsync(marker.fileno())
            sync_folder(self.partial)
            os.rename(self.partial, self.path)
            sync_folder(self.folder)
        except OSError as error:
            raise written_badly(error, self.partial) from error
        older = [saved.path for saved in complete_ones(self.folder) if saved.path != self.path]
        others = [path for path in older if path not in self._replaced]
        surplus = others[: len(others) - keep] if keep is not None and keep < len(others) else []
        for path in (*self._replaced, *surplus):
            _remove(path)
        self._unlock()

    def abandon(self) -> None:
        """Remove what was written. Idempotent; does not raise."""
        if self._lock_fd >= 0 or self.partial.exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        self._unlock()

    def _check(self, files: Mapping[str, int]) -> None:
        for name, nbytes in files.items():
            try:
                size = (self.partial / name).stat().st_size
            except OSError:
                size = 0
            if size < nbytes:
                raise SwapPathError(
                    f"rank 0 does not see what another rank wrote: {name}",
                    path=self.partial,
                    fix="save into a folder that all ranks share",
                )

    def _free_name(self) -> str:
        name = base = f"step-{self.step:08}"
        number = 2
        while (self.folder / name).exists():  # an incomplete one of somebody's own, too
            name, number = f"{base}.{number}", number + 1
        return name

    def _clean(self) -> None:
        for name in os.listdir(self.folder):
            if _LEFT_BEHIND.fullmatch(name):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                log.info("removed %s, which an interrupted save left behind", name)

    def _lock(self) -> bool:
        """False where the filesystem has no locks: then others' leftovers can't be told from what
        they are writing now, and stay."""
        self._lock_fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SwapOwnerError(
                "somebody else is saving a checkpoint here", path=self.folder,
                fix="wait for it, or give each job a folder of its own",
            ) from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        return True

    def _unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # a forked child has it open still
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _remove(path: Path) -> None:
    """By a rename first: a removal that is interrupted leaves nothing that looks complete."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning("the old checkpoint %s could not be removed: %s", path, error)


def sync_folder(folder: Path) -> None:
    """Names in it survive a loss of power from here on."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def written_badly(error: OSError, path: Path, wanted_nbytes: int | None = None) -> Exception:
    """Our error for one of the system's."""
    intact = "the older checkpoints"
    if error.errno in _FULL:
        with contextlib.suppress(OSError):
            return SwapSpaceError(
                "the filesystem is too full for a checkpoint", path=path,
                wanted_nbytes=wanted_nbytes, got_nbytes=shutil.disk_usage(path).free,
                errno=error.errno, intact=intact, fix="free space, or keep fewer (keep=...)",
            )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST,
                       errno.ENOENT):
        return SwapPathError("a checkpoint can't be written", path=path, errno=error.errno,
                             fix="name a folder that you may write")
    return SwapWriteError("a checkpoint can't be written", path=path, errno=error.errno,
                          cause=str(error), intact=intact, fix="see the kernel's log")
