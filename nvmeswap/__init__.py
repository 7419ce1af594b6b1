"""nvmeswap: training state that does not fit in memory lives on NVMe.

Doors: `TensorSwapper` (any tensor, by name), `SwappedAdamW` (an optimizer whose state is on NVMe)
and `nvmeswap.zero3.shard` (ZeRO-3 with parameters and optimizer state on NVMe).
"""

from nvmeswap.errors import SwapError
from nvmeswap.swap.adamw import SwappedAdamW
from nvmeswap.swap.tensors import TensorSwapper

__all__ = ["SwapError", "SwappedAdamW", "TensorSwapper"]
