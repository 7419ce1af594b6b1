"""The configuration: DeepSpeed's JSON, read and checked once, at the door."""

from nvmeswap.config.blocks import (
    DEFAULT_SUB_GROUP_NUMEL,
    AioConfig,
    OffloadDevice,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerBlock,
    PrecisionBlock,
    SwapBlock,
    ZeroConfig,
)
from nvmeswap.config.load import Config, SameDriveWarning, check_folders

__all__ = [
    "DEFAULT_SUB_GROUP_NUMEL",
    "AioConfig",
    "Config",
    "OffloadDevice",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerBlock",
    "PrecisionBlock",
    "SameDriveWarning",
    "SwapBlock",
    "ZeroConfig",
    "check_folders",
]
