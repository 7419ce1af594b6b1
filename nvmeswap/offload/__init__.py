"""Any `nn.Module` on one device, its layers in host memory or on NVMe until they are used.

The user's loop stays as it is; the model's layers come and go. `manager.py` has the door,
`units.py` says what comes together, `window.py` what is on the device, `passes.py` when.
"""

from nvmeswap.offload.doors import (
    OffloadTrainingManager,
    apply_group_offloading,
    cpu_offload,
    disk_offload,
    enable_layerwise_offload,
)
from nvmeswap.offload.manager import OffloadManager, manager_of
from nvmeswap.offload.recommend import Recommendation, recommend, recommend_pipeline

__all__ = [
    "OffloadManager",
    "OffloadTrainingManager",
    "Recommendation",
    "apply_group_offloading",
    "cpu_offload",
    "disk_offload",
    "enable_layerwise_offload",
    "manager_of",
    "recommend",
    "recommend_pipeline",
]
