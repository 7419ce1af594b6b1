"""What every block of the configuration has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Block(BaseModel):
    """One JSON object. Subclasses list the keys that are known but have no effect here (`ignored`)
    and those that are refused, each with the reason."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)
    ignored: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _resolve_auto(cls, data: Any) -> Any:
        if isinstance(data, BaseModel):
            return data
        if not isinstance(data, Mapping):
            raise ValueError(f"must be a JSON object, got {type(data).__name__}")
        return {
            key: value
            for key, value in data.items()
            if not (value is None or value == "auto" or key in cls.ignored or key in cls.refused)
        }
