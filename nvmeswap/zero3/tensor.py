"""The local tensor of a swapped parameter: a shape and a key, no storage.

FSDP2 keeps a rank's part of a parameter as the local tensor of a DTensor. `SwappedTensor` stands in
its place. FSDP2 asks it for data by the two all-gather methods; anybody else who reads it gets a
copy from the store, `copy_` onto it writes the store, and whatever would silently do the wrong
thing raises. docs/design.md gives the alternatives that were tried and why they fail.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_map

from nvmeswap.errors import SwapUsageError


class ShardSource(Protocol):
    """Who has the bytes of swapped parameters, by key."""

    def gather_input(self, key: str) -> torch.Tensor:
        """This rank's shard for the all-gather: padded sharded shape, compute dtype, on the
        device."""

    def read_shard(self, key: str) -> torch.Tensor:
        """The shard's values at full precision: local shape and the DTensor's dtype, on its
        device."""

    def write_shard(self, key: str, values: torch.Tensor) -> None:
        """Replace the shard's values by a tensor of the local shape."""

    def stored_dtype(self, key: str) -> torch.dtype:
        """Of what `read_part` gives."""

    def read_part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Stored elements of a shard, flat, on the host."""

    def write_part(self, key: str, start: int, values: torch.Tensor) -> None:
        """Replace stored elements of a shard that is not trained."""


# A tensor holds a number and not its source: a reference would make deepcopy and DCP's stager,
# which copy what a tensor refers to, copy the whole swap space.
_sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_source(source: object) -> int:
    """A number under which tensors find `source` for as long as it lives."""
    number = next(_numbers)
    _sources[number] = source
    return number


@dataclass(frozen=True, slots=True)
class ShardHandle:
    """Which shard, or gradient of it, a tensor stands for."""

    source_number: int
    key: str

    @property
    def source(self) -> Any:
        """Whoever was registered."""
        source = _sources.get(self.source_number)
        if source is None:
            raise SwapUsageError(
                f"{self.key}: its swap space is closed",
                fix="keep the optimizer that shard() returned",
            )
        return source


class SwappedTensor(torch.Tensor):
    """See the module's text. `padded` marks the flat stand-in for FSDP2's padded shard, which reads
    as zeros behind the shard's last element."""

    handle: ShardHandle

    @staticmethod
    def __new__(
        cls, handle: ShardHandle, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> SwappedTensor:
        tensor: SwappedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        tensor.handle = handle
        return tensor

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True: FSDP2 then leaves the local tensor alone where it would pad or copy it."""
        return True

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """FSDP2's question before an all-gather: this rank's part, padded."""
        source: ShardSource = self.handle.source
        return (source.gather_input(self.handle.key),), None

    # FSDP2 asks for it at each gather, and Python takes ten times as long to find it out.
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """FSDP2's question after it: the gathered buffer is the parameter as it is."""
        if out is not None:
            return None
        return all_gather_outputs[0], ()

    def read(self) -> torch.Tensor:
        """A copy of the values, from the store."""
        source: ShardSource = self.handle.source
        values = source.read_shard(self.handle.key)
        if values.shape == self.shape:
            return values
        padded = values.new_zeros(self.numel())  # the flat stand-in
        padded[: values.numel()].copy_(values.reshape(-1))
        return padded.view(self.shape)

    # torch answers these without asking the dispatcher, from storage that is not there.
    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A copy of the values."""
        return self.read()

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A copy of the values in host memory."""
        return self.read().cpu()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """A copy of the values as an array."""
        return self.read().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.read().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, as by torch.save, it is an ordinary tensor with the values."""
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SwappedTensor({self.handle.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        lazy = _lazy_result(func, args, kwargs)
        if lazy is not None:
            return lazy
        if func is torch.ops.aten.copy_.default and isinstance(args[0], SwappedTensor):
            return _write_through(args[0], args[1])
        _refuse_what_would_be_lost(func, args, kwargs)
        return func(*tree_map(_read_if_swapped, args), **tree_map(_read_if_swapped, kwargs))


def _stand_in(tensor: SwappedTensor) -> SwappedTensor:
    return SwappedTensor(
        tensor.handle, shape=tensor.shape, dtype=tensor.dtype, device=tensor.device
    )


def _lazy_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SwappedTensor | None:
    """The same shard again, for operations that return all of it unchanged; else None."""
    aten = torch.ops.aten
    tensor = args[0] if args else None
    if not isinstance(tensor, SwappedTensor):
        return None
    if func in (aten.detach.default, aten.alias.default):
        return _stand_in(tensor)
    if func in (aten.view.default, aten._unsafe_view.default):
        return _stand_in(tensor) if tuple(args[1]) == tuple(tensor.shape) else None
    if func is aten.slice.Tensor:
        return _stand_in(tensor) if _is_whole_slice(tensor, *args[1:], **kwargs) else None
    return None


def _is_whole_slice(
    tensor: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> bool:
    return (start or 0) == 0 and (end is None or end >= tensor.size(dim)) and step == 1


def _write_through(tensor: SwappedTensor, source: torch.Tensor) -> SwappedTensor:
    values = _read_if_swapped(source)
    tensor.handle.source.write_shard(
        tensor.handle.key, torch.broadcast_to(values, tensor.shape).contiguous()
    )
    return tensor


def _refuse_what_would_be_lost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    schema = func._schema
    name = func.name()
    if any(map(_holds_swapped, written_arguments(schema, args, kwargs))):
        _refuse(name, "it would write to a copy", "assign with copy_, or update by the optimizer")
    returns_a_view = any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    if returns_a_view and _holds_swapped(args[:1]):
        _refuse(name, "a view of a swapped parameter would be a copy", "take tensor.clone() first")
    short = schema.name.rpartition("::")[2]
    if short.startswith("new_") or short.endswith("_like"):
        _refuse(
            name,
            "it would make a tensor that stands for no shard",
            "build the tensor from the shape, dtype and device",
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        _refuse(
            name,
            "random values would differ from those of a resident parameter",
            "initialise before nvmeswap.zero3.shard, or copy_ the values",
        )


def written_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Those of an operation's arguments that it writes to."""
    positional = list(zip(schema.arguments, args, strict=False))
    named = [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    return [
        value
        for argument, value in positional + named
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _holds_swapped(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_swapped, value))
    return isinstance(value, SwappedTensor)


def _read_if_swapped(value: Any) -> Any:
    return value.read() if isinstance(value, SwappedTensor) else value


def _refuse(name: str, why: str, fix: str) -> NoReturn:
    raise SwapUsageError(f"{name} is not for a swapped parameter: {why}", fix=fix)
