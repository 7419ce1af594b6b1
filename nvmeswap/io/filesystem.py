"""What kind of filesystem a folder lies on, and what to tell the user about it, once."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path


class BufferedFallbackWarning(UserWarning):
    """Direct I/O was refused in a folder; its files go through the page cache."""


class FilesystemWarning(UserWarning):
    """The folder's filesystem is not a local disk's, or keeps its data in the page cache."""


_NOTES = {
    "nfs": "swap traffic goes over the network",
    "cifs": "swap traffic goes over the network",
    "smb": "swap traffic goes over the network",
    "fuse": "a user-space server stands between swap and disk, and may use the page cache",
    "btrfs": "with data checksums direct I/O silently becomes buffered, so the page cache is used",
    "zfs": "it may ignore O_DIRECT, so its own cache in RAM is used",
    "overlay": "the layer below may use the page cache",
    "tmpfs": "it lives in RAM: what is swapped there frees no memory",
    "ramfs": "it lives in RAM: what is swapped there frees no memory",
}

# Blanks in a mount point are written as octal escapes, all else as it is, in any encoding.
_ESCAPE = re.compile(rb"\\([0-7]{3})")

_told: set[tuple[type[Warning], Path]] = set()


def filesystem_type(folder: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type ("ext4", "tmpfs", ...) of the mount that holds `folder`, or "unknown"."""
    resolved = os.path.realpath(folder)
    best_point, best_type = "", "unknown"
    for line in mountinfo.read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        point = os.fsdecode(_ESCAPE.sub(_unescaped, before.split(b" ")[4]))
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        # A later mount over the same point hides the earlier one.
        if inside and len(point) >= len(best_point):
            best_point, best_type = point, after.split(b" ")[0].decode()
    return best_type


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def filesystem_note(filesystem: str) -> str | None:
    """What a user should know before swapping to such a filesystem; None for a local disk's."""
    for family, note in _NOTES.items():
        if filesystem.startswith(family):
            return note
    return None


def warn_filesystem(folder: Path, filesystem: str) -> None:
    """Warn once a folder, if there is something to say about its filesystem."""
    note = filesystem_note(filesystem)
    if note is not None:
        _warn_once(folder, FilesystemWarning, f"{folder} is on {filesystem}: {note}")


def warn_buffered(folder: Path, errno: int) -> None:
    """Warn once a folder that its files go through the page cache, and why."""
    _warn_once(
        folder,
        BufferedFallbackWarning,
        f"direct I/O was refused in {folder} (filesystem {filesystem_type(folder)}, "
        f"errno {errno}: {os.strerror(errno)}); its files go through the page cache, which costs "
        f"memory and speed. Use a folder on ext4 or xfs on a local NVMe drive.",
    )


def _warn_once(folder: Path, category: type[Warning], text: str) -> None:
    if (category, folder) not in _told:
        _told.add((category, folder))
        warnings.warn(text, category, stacklevel=4)
