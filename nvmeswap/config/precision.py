"""The blocks `bf16` and `fp16`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from nvmeswap.config import keys
from nvmeswap.config.block import Block


class Bf16Block(Block):
    """`bf16`."""

    ignored: ClassVar[Mapping[str, str]] = keys.BF16_IGNORED
    refused: ClassVar[Mapping[str, str]] = keys.PRECISION_REFUSED
    enabled: bool = Field(
        default=False,
        description="Compute in bf16; reductions, masters and moments stay fp32.",
    )


class Fp16Block(Block):
    """`fp16`, with DeepSpeed's keys of loss scaling: `nvmeswap.zero3.GradScaler.from_config`."""

    ignored: ClassVar[Mapping[str, str]] = keys.FP16_IGNORED
    refused: ClassVar[Mapping[str, str]] = keys.PRECISION_REFUSED
    enabled: bool = Field(
        default=False,
        description=(
            "Compute in fp16; reductions, masters and moments stay fp32. Losses are to be scaled "
            "by nvmeswap.zero3.GradScaler, which the other keys are for."
        ),
    )
    loss_scale: float = Field(
        default=0.0, ge=0, description="A scale that never changes; 0: it is found as below."
    )
    initial_scale_power: int = Field(
        default=16, ge=0, le=126, description="The first scale is 2 to this power."
    )
    loss_scale_window: int = Field(
        default=1000, ge=1, description="Steps without overflow after which the scale doubles."
    )
    hysteresis: int = Field(
        default=2,
        ge=1,
        description="The scale is halved at this overflow; those before it only skip their step.",
    )
    consecutive_hysteresis: bool = Field(
        default=False,
        description="Count overflows anew after each good step, not only when the scale doubles.",
    )
    min_loss_scale: float = Field(
        default=1.0,
        gt=0,
        description="The scale never sinks below it; an overflow there is an error.",
    )
