"""The header of a safetensors file, made and read.

    8 bytes, little-endian: length of the header
    the header, JSON padded with blanks to a multiple of 8 bytes:
        {"__metadata__": {"step": "3"}, "weight": {"dtype": "BF16", "shape": [8, 4],
         "data_offsets": [first byte, end byte], after the header}}
    the tensors' elements, without a gap, those of the largest dtypes first: so all are aligned
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nvmeswap.errors import SwapManifestError, SwapUsageError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_METADATA = "__metadata__"
LENGTH_NBYTES = 8
LARGEST_HEADER_NBYTES = 100_000_000  # readers of the format refuse a larger one
# What the library says, and which part of the header it means; of all else, the whole.
_FIELDS = {
    "incomplete metadata": "data_offsets",
    "invalid offset": "data_offsets",
    "invalid shape": "shape",
    "unknown variant": "dtype",
}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a tensor in a state file is, apart from its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


class Place(NamedTuple):
    """A tensor, and where in the file its elements begin."""

    tensor: TensorShape
    offset_bytes: int

    def byte_of(self, element: int) -> int:
        """Where an element begins."""
        return self.offset_bytes + element * self.tensor.dtype.itemsize


def lay_out(
    path: Path, tensors: Mapping[str, TensorShape], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Place]]:
    """The file's header with its length before it, and where each tensor goes after it.

    Raises SwapUsageError for a dtype, name or text that the format does not have.
    """
    content: dict[str, Any] = {}
    if metadata:
        content[_METADATA] = dict(metadata)
    wrong = [key for key, text in metadata.items() if not isinstance(text, str)]
    wrong += [name for name, tensor in tensors.items() if tensor.dtype not in _DTYPE_NAMES]
    if wrong or _METADATA in tensors:
        raise SwapUsageError(
            f"the safetensors format can't hold {(wrong or [_METADATA])[0]!r}", path=path,
            fix="tensors of a dtype it knows, metadata of texts, and no tensor of the name "
            f"{_METADATA}",
        )
    begins: dict[str, int] = {}
    begin = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        tensor = tensors[name]
        begins[name] = begin
        content[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_NBYTES)
    if len(header) > LARGEST_HEADER_NBYTES:
        raise SwapUsageError(
            f"a header of {len(header):_} bytes is more than readers take",
            path=path, fix="write several files, or shorter names and metadata",
        )
    whole = len(header).to_bytes(LENGTH_NBYTES, "little") + header
    return whole, {name: Place(tensors[name], len(whole) + at) for name, at in begins.items()}


def find_tensors(
    path: Path, mapped_path: str, data_begin: int
) -> tuple[dict[str, Place], dict[str, str]]:
    """Where each tensor of a file is, and its metadata; `data_begin` is the byte after its header.
    `mapped_path` is what the library maps meanwhile, `path` what errors name.

    Raises SwapManifestError, its `field` the part of the header that is wrong; OSError.
    """
    places = {}
    try:
        with safe_open(mapped_path, framework="np") as file:
            for name in file.offset_keys():  # in the order of the file, which has no gaps
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise SwapManifestError(
                        f"{name!r} is {part.get_dtype()}, which can't be read piece by piece",
                        field="dtype", path=path,
                    )
                places[name] = Place(TensorShape(dtype, tuple(part.get_shape())), data_begin)
                data_begin += places[name].tensor.nbytes
            return places, dict(file.metadata() or {})
    except SafetensorError as error:
        text = str(error)
        field = next((field for part, field in _FIELDS.items() if part in text), "header")
        raise SwapManifestError(
            f"not a whole safetensors file: {text}", field=field, path=path,
            fix="take an older file, or save it again",
        ) from error
