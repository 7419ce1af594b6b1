"""How much memory the process's control groups still allow.

Facts. The limit of every ancestor counts, not only that of the process's own group. A process in a
container may see its group's folder mounted as the root, and then /proc/self/cgroup gives a path
that does not exist below the mount. Page cache is charged too, but its inactive part is dropped
before anything is killed (kernel docs, cgroup-v2 "memory.stat"). Past the limit the kernel kills
the process (v1, v2 memory.max), so the check must come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Version:
    limit_file: str
    usage_file: str
    reclaimable_field: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def headroom_nbytes(proc: Path = Path("/proc/self")) -> int | None:
    """The least headroom of the process's own group and its ancestors; None where none limits.

    Does not block. `proc` is where the kernel describes the process.
    """
    rooms = [
        room
        for version, folder in _memory_folders(proc)
        if (room := _folder_headroom_nbytes(version, folder)) is not None
    ]
    return min(rooms, default=None)


def _memory_folders(proc: Path) -> Iterator[tuple[_Version, Path]]:
    groups = _own_groups(proc)
    for line in (proc / "mountinfo").read_text().splitlines():
        # 36 35 98:0 /root /mount/point options [optional fields] - type source super_options
        before, _, after = line.partition(" - ")
        kind, _, super_options = after.split(" ", 2)
        root, mount_point = before.split()[3:5]
        if kind == "cgroup2" and "" in groups:
            version, group = _V2, groups[""]
        elif kind == "cgroup" and "memory" in super_options.split(",") and "memory" in groups:
            version, group = _V1, groups["memory"]
        else:
            continue
        mount = Path(mount_point)
        folder = mount / group.removeprefix(root).lstrip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = mount
        yield version, mount
        while folder != mount:
            yield version, folder
            folder = folder.parent


def _own_groups(proc: Path) -> dict[str, str]:
    """Controller to group path; the key "" is version 2's single tree."""
    groups: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _folder_headroom_nbytes(version: _Version, folder: Path) -> int | None:
    try:
        limit = (folder / version.limit_file).read_text().strip()
        usage = int((folder / version.usage_file).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None  # version 2's root, or a tree without the memory controller
    if limit == "max":
        return None
    fields = dict(line.split() for line in statistics.splitlines())
    return max(0, int(limit) - usage + int(fields.get(version.reclaimable_field, 0)))
