"""nvmeswap: training state that does not fit in memory lives on NVMe.

Doors: `TensorSwapper` (any tensor, by name), `SwappedOptimizer` (any elementwise torch optimizer
with its state on NVMe; `SwappedAdamW` is AdamW), `OffloadManager` (any module on one device, its
layers in host memory or on NVMe until they are used), `lazy` and `LazyPipeline` (components that
come and go as a whole) and `nvmeswap.zero3.shard` (ZeRO-3 with parameters and optimizer state on
NVMe).
"""

from nvmeswap.errors import SwapError
from nvmeswap.offload.lazy import lazy
from nvmeswap.offload.manager import OffloadManager
from nvmeswap.offload.pipeline import LazyPipeline
from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.swap.overlap import OverlapSettings
from nvmeswap.swap.swapped import SwappedOptimizer
from nvmeswap.swap.tensors import TensorSwapper

__all__ = [
    "LazyPipeline", "OffloadManager", "OverlapSettings", "SwapError", "SwappedAdamW",
    "SwappedOptimizer", "TensorSwapper", "lazy",
]
