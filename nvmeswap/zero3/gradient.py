"""The local tensor of a gradient that is in host memory: what is left in `parameter.grad`.

FSDP2 leaves each reduced gradient in `parameter.grad`, on the device. We take it to the host and
put a `HeldGradient` into its place, which has a shape and a key and no storage. So whoever looks at
`parameter.grad` sees the gradient: torch.nn.utils.clip_grad_norm_, GradScaler, a logger of norms,
and FSDP2 itself, when it adds the next micro-batch's. Nothing of torch has to be replaced for it,
and `parameter.grad = None` means what it always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from nvmeswap.errors import SwapUsageError
from nvmeswap.zero3.tensor import ShardHandle, written_arguments


class GradientSource(Protocol):
    """Who has the gradients, by key."""

    def gradient_values(self, key: str, serial: int) -> torch.Tensor:
        """The gradient in host memory, itself and not a copy, flat. Raises SwapUsageError if it is
        no more: `serial` tells gradients of one key apart."""

    def add_to_gradient(self, key: str, serial: int, values: torch.Tensor) -> None:
        """Add one more micro-batch's, of any shape and device; raises as `gradient_values`."""

    def gradient_was_edited(self, key: str) -> None:
        """Somebody wrote to it."""


class HeldGradient(torch.Tensor):
    """Stands for a gradient in host memory. Reading it on a GPU copies it there; writing to it
    writes to the host's. One that was kept beyond its gradient's life raises."""

    handle: ShardHandle
    serial: int

    @staticmethod
    def __new__(
        cls,
        handle: ShardHandle,
        serial: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> HeldGradient:
        tensor: HeldGradient = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        tensor.handle, tensor.serial = handle, serial
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def read(self) -> torch.Tensor:
        """Its values: on a CPU the host's memory itself, on a GPU a copy."""
        source: GradientSource = self.handle.source
        values = source.gradient_values(self.handle.key, self.serial)
        return values.view(self.shape).to(self.device)

    def write_back(self, values: torch.Tensor) -> None:
        """`values`, which `read` gave, have been written to."""
        source: GradientSource = self.handle.source
        if self.device.type != "cpu":
            source.gradient_values(self.handle.key, self.serial).copy_(values.reshape(-1))
        source.gradient_was_edited(self.handle.key)

    # torch answers these without asking the dispatcher, from storage that is not there.
    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A copy of the values in host memory."""
        return self.read().detach().clone().cpu()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """A copy of the values as an array."""
        return self.cpu().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.read().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled it is an ordinary tensor with the values."""
        return self.cpu().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HeldGradient({self.handle.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, HeldGradient):
            if func in _THE_SAME_AGAIN:
                return _stand_in(first)
            if func is torch.ops.aten.add_.Tensor and _is_plain(args[1]) and not kwargs:
                first.handle.source.add_to_gradient(first.handle.key, first.serial, args[1])
                return first
        if "foreach_" in func.name():
            return _one_by_one(func, args, kwargs)
        return _on_values(func, args, kwargs)


_THE_SAME_AGAIN = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _stand_in(tensor: HeldGradient) -> HeldGradient:
    return HeldGradient(
        tensor.handle,
        tensor.serial,
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
    )


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the values; what it wrote to is written back, and returned as it was."""
    _refuse_views_of_copies(func, args)
    values: dict[int, torch.Tensor] = {}

    def read(value: Any) -> Any:
        if isinstance(value, HeldGradient):
            return values.setdefault(id(value), value.read())
        return value

    result = func(*tree_map(read, args), **tree_map(read, kwargs))
    for written in written_arguments(func._schema, args, kwargs):
        for each in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(each, HeldGradient):
                each.write_back(values[id(each)])
                if result is values[id(each)]:
                    result = each
    return result


def _refuse_views_of_copies(func: Any, args: tuple[Any, ...]) -> None:
    first = args[0] if args else None
    if not isinstance(first, HeldGradient) or first.device.type == "cpu":
        return  # a view of the host's memory itself
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        raise SwapUsageError(
            f"{func.name()} is not for a gradient in host memory: what is written to that view "
            "would be lost",
            fix="take gradient.clone() first, and copy_ it back",
        )


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation over lists of gradients, without all of them on a GPU at once."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and value]
    count = len(lists[0])
    if any(len(each) != count for each in lists):
        raise SwapUsageError(
            f"{func.name()} over lists of different lengths is not for gradients in host memory",
            fix="call it for one gradient at a time",
        )
    results: list[Any] = []
    for index in range(count):
        single = tuple(
            [value[index]] if isinstance(value, (list, tuple)) and value else value
            for value in args
        )
        result = _on_values(func, single, kwargs)
        results += result or ()
    return results or None
