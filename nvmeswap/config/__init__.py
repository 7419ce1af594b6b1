"""The configuration: DeepSpeed's JSON, read and checked once, at the door."""

from nvmeswap.config.blocks import (
    DEFAULT_SUB_GROUP_NUMEL,
    AioConfig,
    OffloadDevice,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerBlock,
    SwapBlock,
    ZeroConfig,
)
from nvmeswap.config.load import Config, SameDriveWarning, check_folders
from nvmeswap.config.precision import Bf16Block, Fp16Block
from nvmeswap.config.quantities import Nbytes, elements

__all__ = [
    "DEFAULT_SUB_GROUP_NUMEL",
    "AioConfig",
    "Bf16Block",
    "Config",
    "Fp16Block",
    "Nbytes",
    "OffloadDevice",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerBlock",
    "SameDriveWarning",
    "SwapBlock",
    "ZeroConfig",
    "check_folders",
    "elements",
]
