"""Checkpoints of a swapped model, through torch.distributed.checkpoint."""

from nvmeswap.zero3.checkpoint.export import export
from nvmeswap.zero3.checkpoint.folder import latest
from nvmeswap.zero3.checkpoint.load import Resumed, load
from nvmeswap.zero3.checkpoint.save import Saving, save

__all__ = ["Resumed", "Saving", "export", "latest", "load", "save"]
