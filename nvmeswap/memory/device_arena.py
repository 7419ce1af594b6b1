"""Device memory for slots, allocated beside torch's allocator.

cuFile can register memory that the driver has allocated as one, but not what torch maps piece by
piece where `expandable_segments` is on: so the slots have an allocation of their own, and tensors
are copied to and from them on the device.
"""

from __future__ import annotations

import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io.cuda_driver import DeviceMemory

__all__ = ["DeviceArena"]


class DeviceArena:
    """One allocation on one GPU, as a flat uint8 tensor.

        arena = DeviceArena(32 << 20, torch.device("cuda:0"))
        engine.register_memory(arena.memory)            # an engine with backend "gds"
        pool = Pool(arena.memory, classes, name="device")
        ...
        engine.unregister_memory(arena.memory)
        arena.close()

    Args: `nbytes`, the size; `device`, a CUDA device (without a number: the current one).
    Content at the start is undefined. `memory` begins at a multiple of 4096.
    Raises: SwapUsageError for another kind of device, without a driver, or when the GPU has no
    room.
    Blocking: construction allocates; the memory goes, waiting for the GPU, with its last view.
    Threads: any may use the memory; construct and close in one.
    Ownership: whoever holds a view of `memory` keeps it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise SwapUsageError(f"{device} is no CUDA device", fix='pass torch.device("cuda")')
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.nbytes = nbytes
        self.device = torch.device("cuda", index)
        self.memory = torch.as_tensor(DeviceMemory(nbytes, index), device=self.device)

    def close(self) -> None:
        """Lets go of the memory; calling again does nothing."""
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
