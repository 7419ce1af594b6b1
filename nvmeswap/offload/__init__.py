"""Any `nn.Module` on one device, its layers in host memory or on NVMe until they are used.

The user's loop stays as it is; the model's layers come and go. `manager.py` has the door,
`units.py` says what comes together, `window.py` what is on the device, `passes.py` when.
"""

from nvmeswap.offload.manager import OffloadManager, manager_of

__all__ = ["OffloadManager", "manager_of"]
