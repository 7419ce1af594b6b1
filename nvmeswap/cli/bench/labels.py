"""What a figure is not: words that stand beside every figure that is no measure of the drive."""

from __future__ import annotations

from nvmeswap.cli.bench.device import Device

_IN_MEMORY = ("tmpfs", "ramfs")


def labels(
    *, buffered_nbytes: int, filesystem: str, device: Device, one_way_gb_per_s: float
) -> list[str]:
    """All that apply. `one_way_gb_per_s`: the faster direction's speed, in 1e9 bytes a second."""
    found = []
    if buffered_nbytes:
        found.append("page cache")
    if filesystem in _IN_MEMORY:
        found.append("memory, not a device")
    elif device.link_gb_per_s is None:
        found.append("link unknown")
    elif one_way_gb_per_s > device.link_gb_per_s:
        found.append("above the link")
    return found
