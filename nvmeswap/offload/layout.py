"""Where the tensors of a unit lie in one piece of memory, the same at home and on the device.

Tensors that share a storage share a **segment**: the bytes of that storage that they use, with
their offsets and strides as they were. So ties by storage, weights of an LSTM that must be
neighbours, channels_last and expanded tensors all come back as they were.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from nvmeswap.errors import SwapUsageError
from nvmeswap.io.alignment import padded_nbytes

# Kernels for fp8 want 32; 256 is what CUDA's allocator gives. Field case C02.
TENSOR_ALIGNMENT_NBYTES = 256
_LARGEST_ITEM_NBYTES = 16  # complex128


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of a block that come from one storage."""

    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor in its block: `offset_bytes` is from the segment's start."""

    segment: Segment
    offset_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def begin_bytes(self) -> int:
        """From the block's start."""
        return self.segment.offset_bytes + self.offset_bytes

    @property
    def span_nbytes(self) -> int:
        """From its first element to behind its last."""
        return span_elements(self.shape, self.stride) * self.dtype.itemsize

    def in_block(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The tensor in a storage that holds the whole block."""
        return self._view(storage, self.begin_bytes, device)

    def in_segment(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in a storage that holds its segment alone."""
        return self._view(storage, self.offset_bytes, storage.device)

    def _view(
        self, storage: torch.UntypedStorage, offset_bytes: int, device: torch.device
    ) -> torch.Tensor:
        start = offset_bytes // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=device).set_(
            storage, start, self.shape, self.stride
        )


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a segment's first values are: bytes of a storage; None for one on the meta device."""

    segment: Segment
    storage: torch.UntypedStorage | None
    begin_bytes: int

    def values(self) -> torch.Tensor:
        """The bytes, flat, on the storage's device."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(
            self.storage, self.begin_bytes, (self.segment.nbytes,), (1,)
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """`places` is in the order of the tensors given."""

    nbytes: int
    places: list[Place]
    sources: list[Source]


def lay_out(tensors: Sequence[torch.Tensor], *, alignment_nbytes: int) -> BlockLayout:
    """Segments one behind the other, each at a multiple of `alignment_nbytes`."""
    groups: dict[int, list[torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        # Storages on the meta device say nothing about ties.
        key = -1 - index if tensor.is_meta else tensor.untyped_storage()._cdata
        groups.setdefault(key, []).append(tensor)
    places: dict[int, Place] = {}
    sources: list[Source] = []
    offset_bytes = 0
    for group in groups.values():
        begin = min(_offset_bytes(t) for t in group)
        if len({t.dtype for t in group}) > 1:
            begin -= begin % _LARGEST_ITEM_NBYTES
        end = max(
            _offset_bytes(t) + span_elements(t.shape, t.stride()) * t.itemsize
            for t in group
        )
        segment = Segment(offset_bytes, max(0, end - begin))
        storage = None if group[0].is_meta else group[0].untyped_storage()
        sources.append(Source(segment, storage, begin))
        for tensor in group:
            places[id(tensor)] = Place(
                segment, _offset_bytes(tensor) - begin, tensor.dtype,
                tensor.shape, tensor.stride(),
            )
        offset_bytes += padded_nbytes(segment.nbytes, alignment_nbytes)
    return BlockLayout(offset_bytes, [places[id(tensor)] for tensor in tensors], sources)


def _offset_bytes(tensor: torch.Tensor) -> int:
    """Of its first element in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def span_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def own_storage(memory: torch.Tensor) -> torch.UntypedStorage:
    """A storage of exactly these bytes (uint8, host), which keeps the memory alive: saving a tensor
    in it writes its bytes, and not those of the arena around it."""
    if not memory.numel():
        return torch.UntypedStorage(0)
    window = (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
    window.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8).untyped_storage()


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise SwapUsageError for a tensor that is not plain memory."""
    kind = type(tensor)
    if is_lazy(tensor):
        raise SwapUsageError(
            f"{name} has no shape yet ({kind.__name__})",
            fix="call the model once before it is offloaded",
        )
    plain = kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(tensor, "ds_id"):
        raise SwapUsageError(
            f"{name} is partitioned by DeepSpeed's ZeRO",
            fix="use nvmeswap.deepspeed for it; a managed model must not be sharded",
        )
    if torch.is_inference(tensor):
        raise SwapUsageError(
            f"{name} was made in inference mode, and can't be moved in place",
            fix="build the model outside torch.inference_mode()",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise SwapUsageError(
            f"{name} is a conjugate or negative view, whose values are not its bytes",
            fix="make it plain before: tensor.resolve_conj().resolve_neg()",
        )
    if tensor.layout is not torch.strided or (not plain and _is_wrapper(tensor)):
        raise SwapUsageError(
            f"{name} is a {kind.__name__} ({tensor.layout}), whose memory can't be moved as bytes",
            fix="offload before quantising or sharding, or leave this module out of the model",
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its values are in other tensors (quantised ones, DTensor), or nowhere."""
    kind = type(tensor)
    return hasattr(kind, "__tensor_flatten__") or (
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def give_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, also from and to the meta device; it stays the same object."""
    if tensor.is_meta == data.is_meta:
        tensor.data = data
        return
    if isinstance(tensor, torch.nn.Parameter):
        real: torch.Tensor = torch.nn.Parameter(data, requires_grad=tensor.requires_grad)
    else:
        real = data.detach()
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)
