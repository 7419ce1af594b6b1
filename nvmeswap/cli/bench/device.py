"""Which drive a folder lies on, and what its PCIe link can carry.

Only NVMe drives are asked: what a virtual machine's other devices say of their link is made up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# GT/s to bytes a second and lane: 8b/10b up to generation 2, 128b/130b up to 5, FLITs (242 of 256
# bytes) from 6.
_ENCODINGS = ((5.0, 8 / 10), (32.0, 128 / 130), (float("inf"), 242 / 256))


@dataclass(frozen=True, slots=True)
class Device:
    """`name`: of the block device ("nvme0n1", "md0"), None where the filesystem has none.
    `link_gb_per_s`: what its PCIe link carries one way, in 1e9 bytes; None if it isn't known."""

    name: str | None
    link_gb_per_s: float | None


def device_of(folder: Path, *, sysfs: Path = Path("/sys")) -> Device:
    """The device below a folder. Of a RAID or logical volume the links of all drives together."""
    number = os.stat(folder).st_dev
    entry = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return Device(None, None)
    whole = _whole(entry.resolve())
    return Device(whole.name, _link_gb_per_s(whole))


def _link_gb_per_s(block: Path) -> float | None:
    slaves = sorted((block / "slaves").glob("*"))
    if slaves:
        links = [_link_gb_per_s(_whole(slave.resolve())) for slave in slaves]
        known = [link for link in links if link is not None]
        return sum(known) if len(known) == len(links) else None
    if not block.name.startswith("nvme"):
        return None
    for folder in (block / "device").resolve().parents:
        if (folder / "current_link_speed").exists():
            return link_gb_per_s(
                (folder / "current_link_speed").read_text(),
                (folder / "current_link_width").read_text(),
            )
    return None


def _whole(block: Path) -> Path:
    return block.parent if (block / "partition").exists() else block


def link_gb_per_s(speed: str, width: str) -> float | None:
    """One way, in 1e9 bytes a second, from what sysfs says: "16.0 GT/s PCIe" and "4". None for
    "Unknown" and for no lanes."""
    try:
        gigatransfers, lanes = float(speed.split()[0]), int(width)
    except (ValueError, IndexError):
        return None
    encoding = next(share for limit, share in _ENCODINGS if gigatransfers <= limit)
    return gigatransfers * lanes * encoding / 8 or None
