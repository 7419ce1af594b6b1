"""Whether GPUDirect Storage works for a folder, found out by doing it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from nvmeswap.errors import SwapError
from nvmeswap.io import native
from nvmeswap.io.cuda_driver import DeviceMemory
from nvmeswap.io.file import STRIPE_NBYTES, File, Member, open_file
from nvmeswap.io.probe import trial_file
from nvmeswap.io.transfer import DEVICE_ALIGNMENT_NBYTES, Direction, Lane

if TYPE_CHECKING:
    from nvmeswap._native import EngineHandle

_CUFILE = "libcufile.so.0"
_DRIVER = Path("/proc/driver/nvidia-fs")
_UDEV = "/run/udev"  # cuFile looks drives up in it; where it is missing programs have died
_TRIAL_NBYTES = 1 << 16
_BLOCK_NBYTES = 1 << 20
_TIMEOUT_S = 60.0
_still_in_use: list[DeviceMemory] = []  # by transfers that never ended


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """What `probe_gds` found. `mode`: "gpudirect" (NVIDIA's kernel driver nvidia-fs is there, and
    drives move bytes to and from the GPU where it can serve them), "compatibility" (it is not:
    cuFile moves them through host memory of its own), or None: it can't be used, for this
    `reason`."""

    mode: Literal["gpudirect", "compatibility"] | None
    reason: str | None


def probe_gds(folder: Path) -> GdsProbe:
    """Try cuFile in a folder, by a real write and read of memory of the current GPU.

    Looked at in this order, and the first refusal is the reason: cuFile's library; CUDA; /run/udev,
    which containers often lack; the file's registration; whether the bytes come back. Never raises
    for a refusal. Leaves nothing behind but an open cuFile, which is the process's until its end.
    Blocks for up to some seconds, the first time.
    """
    try:
        ctypes.CDLL(_CUFILE)
    except OSError as error:
        return GdsProbe(None, f"cuFile's library can't be loaded: {error}")
    try:
        memory = DeviceMemory(_TRIAL_NBYTES, _current_device())
        if not os.access(_UDEV, os.R_OK | os.X_OK):
            return GdsProbe(None, f"{_UDEV} can't be read; in a container, mount it "
                                  f"(docker run -v {_UDEV}:{_UDEV}:ro)")
        with trial_file(folder) as path:
            reason = _try_folder(path, memory)
    except SwapError as error:
        reason = ", ".join(part for part in (error.what, error.cause) if part)
    if reason is not None:
        return GdsProbe(None, reason)
    return GdsProbe("gpudirect" if _DRIVER.exists() else "compatibility", None)


def _current_device() -> int:
    """A rank's own, lest all ranks take memory of the first one."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _try_folder(path: Path, memory: DeviceMemory) -> str | None:
    # By address, since only torch built for CUDA has tensors of such memory.
    engine = native.open_engine(backend="gds", block_nbytes=_BLOCK_NBYTES,
                                background_nbytes=_BLOCK_NBYTES, queue_depth=1, thread_count=1,
                                fault_script=None)
    try:
        file = open_file(
            (Member(path),), STRIPE_NBYTES, block_nbytes=_BLOCK_NBYTES,
            offset_alignment_nbytes=DEVICE_ALIGNMENT_NBYTES,
            memory_alignment_nbytes=DEVICE_ALIGNMENT_NBYTES,
        )
        try:
            return _try_transfers(engine, file, memory)
        finally:
            file.close()
    finally:
        if not native.close_engine(engine, _TIMEOUT_S):
            _still_in_use.append(memory)


def _try_transfers(engine: EngineHandle, file: File, memory: DeviceMemory) -> str | None:
    written, poison = os.urandom(memory.nbytes), b"\xaa" * memory.nbytes
    native.register_memory(engine, memory.address, memory.nbytes)
    pieces = np.array([(memory.address, 0, memory.nbytes)], np.uint64)
    for direction, content in ((Direction.WRITE, written), (Direction.READ, poison)):
        memory.fill(content)
        request = native.submit(engine, file.handle, direction, Lane.DEMAND, pieces)
        failures = native.wait_request(request, _TIMEOUT_S)
        if failures is None:
            return f"a {direction.name.lower()} was not over within {_TIMEOUT_S} s"
        if (refusal := native.gds_refusal(engine)) is not None:
            return refusal
        if failures:
            return f"a {direction.name.lower()} failed: {os.strerror(-failures[0].status)}"
    if memory.content() != written:
        return "the bytes read differ from those written"
    by_cufile = native.engine_counters(engine)["gpudirect_nbytes"]
    return None if by_cufile == 2 * memory.nbytes else "cuFile was not given the file"
