"""Whether GPUDirect Storage works for a folder, found out by doing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """`mode`: "gpudirect" (the drive moves bytes to and from the GPU), "compatibility" (cuFile
    moves them through host memory of its own), or None: it can't be used, for this `reason`."""

    mode: Literal["gpudirect", "compatibility"] | None
    reason: str | None


def probe_gds(folder: Path) -> GdsProbe:
    """Never raises for a refusal: the first one is the reason."""
    return GdsProbe(None, "not built yet")
