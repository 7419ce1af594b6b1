"""Amounts of memory as people write them: 8589934592, 8e9, "8GiB", "512 MB"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

_UNITS_NBYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_BY_NAME = {name.lower(): nbytes for name, nbytes in _UNITS_NBYTES.items()}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Nbytes:
    """An amount that was written with its unit, where a plain number means something else."""

    count: int


def _parsed(text: str) -> tuple[float, int | None]:
    """The number and the bytes of its unit, None for none."""
    match = _TEXT.fullmatch(text)
    if match is None or match[2].lower() not in (*_BY_NAME, ""):
        raise ValueError('must be a number, or one with a unit such as "8GiB" or "512MiB"')
    return float(match[1]), _BY_NAME.get(match[2].lower())


def _bytes_from(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError("must be a number of bytes, or text with a unit")
    if not isinstance(given, str):
        return given
    number, unit_nbytes = _parsed(given)
    return int(number * (unit_nbytes or 1))


def _elements_or_bytes(given: Any) -> int | Nbytes:
    unit_nbytes = None
    if isinstance(given, str):
        given, unit_nbytes = _parsed(given)
    if isinstance(given, Nbytes):
        return given
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given < 0:
        raise ValueError("must be a number of at least 0, or text with a unit")
    if unit_nbytes is not None:
        return Nbytes(int(given * unit_nbytes))
    if given != int(given):
        raise ValueError("must be a whole number of elements")
    return int(given)


ByteCount = Annotated[
    int, BeforeValidator(_bytes_from), WithJsonSchema({"type": "integer", "format": "bytes"})
]
"""A number of bytes, or text with a unit."""

ElementCount = Annotated[
    int | Nbytes,
    PlainValidator(_elements_or_bytes),
    WithJsonSchema({"type": "integer", "format": "elements", "minimum": 0}),
]
"""A number of elements, or text with a unit, which is bytes."""


def elements(amount: int | Nbytes, *, itemsize: int) -> int:
    """How many elements of `itemsize` bytes an `ElementCount` allows."""
    return amount.count // itemsize if isinstance(amount, Nbytes) else amount
