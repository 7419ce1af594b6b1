"""What was really in use: backend, way of the bytes, memory, drive. Keys of the JSON."""

from __future__ import annotations

from typing import Any

from nvmeswap.cli.bench.device import Device
from nvmeswap.cli.bench.measuring import Session
from nvmeswap.io.probe import FolderProbe


def folder_facts(probe: FolderProbe, device: Device) -> dict[str, Any]:
    """What holds for all that is done in a folder. `refused`: backends tried before the chosen
    one, each with the reason; `direct`: what a trial said."""
    return {
        "backend": probe.backend,
        "refused": {refusal.backend: refusal.reason for refusal in probe.refused},
        "direct": probe.direct,
        "filesystem": probe.filesystem,
        "device": device.name,
        "link_gb_per_s": device.link_gb_per_s,
        "offset_alignment_nbytes": probe.offset_alignment_nbytes,
        "memory_alignment_nbytes": probe.memory_alignment_nbytes,
    }


def session_facts(session: Session) -> dict[str, Any]:
    """What the session's transfers were. `aligned`: none went through a bounce buffer. Of a GPU's
    memory: moved by cuFile, or not, and why not."""
    stats = session.stats()
    buffered_nbytes = stats.read_buffered_nbytes + stats.write_buffered_nbytes
    return {
        "path": "direct" if buffered_nbytes == 0 else "buffered",
        "direct": buffered_nbytes == 0,
        "direct_nbytes": stats.read_direct_nbytes + stats.write_direct_nbytes,
        "buffered_nbytes": buffered_nbytes,
        "registered_nbytes": session.registered_nbytes,
        "register_s": session.register_s,
        "aligned": stats.bounced_nbytes == 0,
        "bounced_nbytes": stats.bounced_nbytes,
        "gpudirect_nbytes": stats.gpudirect_nbytes,
        "device_bounced_nbytes": stats.device_bounced_nbytes,
        "gds_refusal": session.gds_refusal,
    }
