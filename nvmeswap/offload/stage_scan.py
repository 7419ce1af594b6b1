"""Which lazy modules a stage can reach: through its attributes, containers and functions.

Nothing is called and no attribute is computed, so looking loads nothing. What is found too little
costs nothing but memory: it is released at the end of the run and not after its last stage.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nvmeswap.offload.component import Component
from nvmeswap.offload.lazy import LazyModule

_CONTAINERS = (list, tuple, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE = (
    str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType,
    types.BuiltinFunctionType, torch.Tensor,
)


def components_in(
    stage: object, owners: Mapping[nn.Module, Component], *, skip: type
) -> set[Component]:
    """The components that the stage reaches, by their stand-ins or by modules of `owners`. What is
    of the class `skip` is not looked into."""
    found: set[Component] = set()
    seen: dict[object, object] = {}  # keeps what was seen alive, so that no id is used twice
    left = [stage]
    while left:
        each = left.pop()
        kind = type(each)  # isinstance would ask stand-ins for what they stand for
        if kind is LazyModule:
            found.add(each._lazy_component)  # type: ignore[attr-defined]
        elif issubclass(kind, nn.Module) and each in owners:
            found.add(owners[each])  # type: ignore[index]
        elif not issubclass(kind, (*_OPAQUE, skip)) and _identity(each) not in seen:
            seen[_identity(each)] = each
            left.extend(_inside(each, kind))
    return found


def _identity(each: object) -> object:
    if type(each) is types.MethodType:  # made anew whenever it is asked for
        return id(each.__func__), id(each.__self__)
    return id(each)


def _inside(each: Any, kind: type) -> Iterator[object]:
    if issubclass(kind, types.FunctionType):
        yield from _of_function(each)
    elif issubclass(kind, types.MethodType):
        yield from _of_function(each.__func__)
        yield from _named(each.__self__, _names(each.__func__))
    elif issubclass(kind, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif issubclass(kind, (dict, types.MappingProxyType)):
        yield from list(each.keys())
        yield from list(each.values())
    for base in _CONTAINERS:
        if issubclass(kind, base):
            yield from list(base.__iter__(each))
    yield from _attributes(each).values()


def _of_function(function: Any) -> Iterator[object]:
    """What it closes over, its defaults, and the global names that it mentions."""
    if not isinstance(function, types.FunctionType):
        return
    names = _names(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
        yield from _mentioned(content, names)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        # Functions of other files are libraries, mostly, and would lead anywhere.
        elsewhere = type(value) is types.FunctionType and (
            value.__globals__ is not function.__globals__
        )
        if not elsewhere:
            yield from _mentioned(value, names)


def _mentioned(value: object, names: set[str]) -> Iterator[object]:
    """Of an object that the function can't call (a pipeline, a namespace) only the attributes that
    it mentions: it may have all components, for other stages."""
    kind = type(value)
    whole = (LazyModule, *_FUNCTIONS, *_CONTAINERS, *_OPAQUE, dict, types.MappingProxyType)
    if issubclass(kind, whole) or any("__call__" in vars(base) for base in kind.__mro__):
        yield value
    else:
        yield from _named(value, names)


def _named(owner: object, names: set[str]) -> Iterator[object]:
    """Attributes and methods of `owner` with these names."""
    if type(owner) is LazyModule:
        yield owner
        return
    attributes = _attributes(owner)
    for name in names:
        if name in attributes:
            yield attributes[name]
            continue
        for base in type(owner).__mro__:
            member = vars(base).get(name)
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, types.FunctionType):
                yield types.MethodType(member, owner)
                break


def _names(function: Any) -> set[str]:
    """Of globals and attributes that its code mentions, inner functions included."""
    names: set[str] = set()
    codes: list[types.CodeType] = [function.__code__] if hasattr(function, "__code__") else []
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    return names


def _attributes(each: object) -> dict[str, object]:
    """In its `__dict__` and its slots."""
    found: dict[str, object] = {}
    for base in type(each).__mro__:
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType and base.__module__ != "builtins":
                try:
                    found[name] = member.__get__(each)
                except AttributeError:
                    continue  # not assigned yet
    with contextlib.suppress(AttributeError, TypeError):
        found.update(object.__getattribute__(each, "__dict__"))
    return found
