"""Our engine in place of DeepSpeed's compiled ops `async_io` and `pin_memory`.

Facts (DeepSpeed 0.19.8, op_builder/builder.py and pin_memory_load.py): `OpBuilder.load` looks into
`OpBuilder._loaded_ops` before it compiles; `pin_memory` is looked up in an attribute of `sys`,
because the builders may be imported under two names, each with a table of its own.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nvmeswap.deepspeed.handle import FileName, aio_handle
from nvmeswap.deepspeed.pinned import pin_handle
from nvmeswap.errors import SwapConfigError

_ASYNC_IO = "async_io"
_PIN_MEMORY = "pin_memory"
_PIN_MEMORY_PLACE = "_deepspeed_pin_memory_op_module"
_undo: list[Callable[[], object]] = []
_BUILDER_MODULES = ("deepspeed.ops.op_builder", "op_builder")


def inject_engine() -> None:
    """Make all of DeepSpeed in this process move its bytes by our engine: parameter and optimizer
    swapping, FastPersist, ds_io. DeepSpeed compiles nothing then, and needs no libaio of its own.

    Call it before `deepspeed.initialize` and `deepspeed.zero.Init`: handles made earlier stay.
    May be repeated. Blocks for importing DeepSpeed. Not thread-safe. Raises SwapConfigError when
    there is no DeepSpeed, or one without these places.
    """
    if _undo:
        return
    async_io = SimpleNamespace(aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write,
                               deepspeed_memcpy=deepspeed_memcpy)
    pin_memory = SimpleNamespace(pin_handle=pin_handle)
    try:
        ops = importlib.import_module("deepspeed.ops")
        importlib.import_module(_BUILDER_MODULES[0])
        builders = [sys.modules[name].AsyncIOBuilder for name in _BUILDER_MODULES
                    if name in sys.modules]
        tables = [_table_of(builder) for builder in builders]
        compatible_ops = ops.__compatible_ops__
    except (ImportError, AttributeError) as error:
        raise SwapConfigError(
            "DeepSpeed's engine can't be replaced", cause=str(error),
            fix="install DeepSpeed 0.19.8, or use nvmeswap.deepspeed.aio_handle directly",
        ) from error
    for table in tables:
        _put(table, _ASYNC_IO, async_io)
    _put(compatible_ops, _ASYNC_IO, True)
    _put(compatible_ops, _PIN_MEMORY, True)
    _put(vars(sys), _PIN_MEMORY_PLACE, pin_memory)


def withdraw_engine() -> None:
    """Put back what `inject_engine` replaced; handles made meanwhile stay. May be repeated."""
    while _undo:
        _undo.pop()()


def _put(table: dict[str, Any], key: str, ours: Any) -> None:
    if key in table:
        _undo.append(functools.partial(table.__setitem__, key, table[key]))
    else:
        _undo.append(functools.partial(table.pop, key, None))
    table[key] = ours


def _table_of(builder: type) -> dict[str, Any]:
    """The one table that its `load` looks into."""
    for each in builder.__mro__:
        if "_loaded_ops" in vars(each):
            table: dict[str, Any] = vars(each)["_loaded_ops"]
            return table
    raise AttributeError(f"{builder} has no table of loaded ops")


def aio_read(
    buffer: torch.Tensor, filename: FileName, block_size: int, queue_depth: int,
    single_submit: bool, overlap_events: bool, validate: bool,
) -> int:
    """`aio_handle.read` by a handle of its own; returns 0."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor, filename: FileName, block_size: int, queue_depth: int,
    single_submit: bool, overlap_events: bool, validate: bool,
) -> int:
    """`aio_handle.write` by a handle of its own; returns 0."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    return handle.write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` to `dest`; returns 0."""
    dest.copy_(src)
    return 0
