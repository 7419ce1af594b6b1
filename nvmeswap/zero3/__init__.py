"""ZeRO-3 on PyTorch's own FSDP2, with parameters and optimizer state on NVMe."""

from nvmeswap.zero3.checkpoint import Resumed, Saving, export, latest, load, save
from nvmeswap.zero3.scaler import GradScaler
from nvmeswap.zero3.swap import SwapStats, ZeroSwap
from nvmeswap.zero3.wrap import shard

__all__ = [
    "GradScaler", "Resumed", "Saving", "SwapStats", "ZeroSwap", "export", "latest", "load", "save",
    "shard",
]
