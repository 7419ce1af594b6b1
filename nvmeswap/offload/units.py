"""From a model to units: which tensors come to the device together, and whose call brings them.

A **unit** is what is brought and released as one. Its **owner** is the module whose call it serves:
either with its whole subtree (a block), or for its own tensors alone (a leaf, or what a module has
beside its children). Pure: nothing is moved or hooked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from nvmeswap.config.quantities import ByteCount
from nvmeswap.errors import SwapConfigError

Granularity = Literal["leaf", "block"] | int | str | Sequence[str]
# torch computes with the weights of these modules' children without calling the children.
_UNCALLED_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_BLOCK_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False, slots=True)
class Member:
    """A parameter or buffer: the one object that all its places in the model share.

    `places`: each module and attribute that it is found at. `name`: that of the first."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class UnitCut:
    """A unit to be: its owner's name, the owner, whether it has the whole subtree, and its members
    in the order of the model."""

    name: str
    owner: nn.Module
    is_whole: bool
    members: list[Member]


def members_of(model: nn.Module) -> list[Member]:
    """Every parameter and buffer, each once."""
    found: dict[int, Member] = {}
    for prefix, module in model.named_modules():
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for attribute, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                member = found.setdefault(id(tensor), Member(name, tensor, is_buffer))
                member.places.append((module, attribute))
    return list(found.values())


def cut_into_units(
    model: nn.Module, members: Sequence[Member], granularity: Granularity
) -> list[UnitCut]:
    """Units in the order of the model; every member is in exactly one.

    "leaf": a unit for each module that has tensors of its own. "block": one for each entry of the
    outermost lists of modules, leaves for the rest. A number of bytes (or "64MB"): subtrees as
    large as fit it; what can't be split may be larger. Names (or patterns): one for each module of
    that name, leaves for the rest. Raises SwapConfigError.
    """
    by_module: dict[nn.Module, list[Member]] = {}
    for member in members:
        for module, _ in member.places:
            by_module.setdefault(module, []).append(member)
    taken: set[int] = set()
    cuts = []
    for name, owner, is_whole in _owners(model, _chooser(granularity, model)):
        modules = owner.modules() if is_whole else [owner]
        own = []
        for module in modules:
            for member in by_module.get(module, []):
                if id(member) not in taken:
                    taken.add(id(member))
                    own.append(member)
        if own:
            cuts.append(UnitCut(name, owner, is_whole, own))
    return cuts


class _Chooser:
    """Says of each module, from the root down, whether its subtree is one unit."""

    def __init__(self, *, limit_nbytes: int | None = None, patterns: Sequence[str] = (),
                 blocks: bool = False) -> None:
        self._limit_nbytes = limit_nbytes
        self._patterns = patterns
        self._blocks = blocks

    def is_unit(self, name: str, module: nn.Module, is_entry: bool) -> bool:
        if isinstance(module, _UNCALLED_CHILDREN):
            return True
        if any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return True
        if not _is_called(module):
            return False
        if self._limit_nbytes is not None:
            return _nbytes(module) <= self._limit_nbytes
        return self._blocks and is_entry


def _owners(
    root: nn.Module, chooser: _Chooser
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Owners with their names, and whether each owns its whole subtree."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, is_entry: bool) -> Iterator[tuple[str, nn.Module, bool]]:
        if module in seen:
            return
        seen.add(module)
        if chooser.is_unit(name, module, is_entry):
            seen.update(module.modules())
            yield name, module, True
            return
        yield name, module, False
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            yield from walk(full_name, child, isinstance(module, _BLOCK_LISTS))

    return walk("", root, False)


def _chooser(granularity: Granularity, model: nn.Module) -> _Chooser:
    if granularity == "leaf":
        return _Chooser()
    if granularity == "block":
        return _Chooser(blocks=True)
    if isinstance(granularity, (str, int)):
        return _Chooser(limit_nbytes=_as_nbytes(granularity))
    patterns = list(granularity)
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SwapConfigError(
                f'no module is called "{pattern}"', key="granularity",
                fix="use names of model.named_modules(), or patterns such as layers.*",
            )
    return _Chooser(patterns=patterns)


def _as_nbytes(given: Any) -> int:
    try:
        nbytes: int = TypeAdapter(ByteCount).validate_python(given)
    except ValidationError as error:
        raise SwapConfigError(
            f"granularity is {given!r}", key="granularity",
            fix='use "leaf", "block", bytes such as "64MB", or a list of module names',
        ) from error
    if nbytes < 1:
        raise SwapConfigError(f"granularity is {given!r}", key="granularity", fix="at least 1 byte")
    return nbytes


def _is_called(module: nn.Module) -> bool:
    """Whether a subtree's owner can be expected to be called itself: it has a forward of its own,
    and is not one of those (autoencoders) whose parts are called from outside."""
    has_forward = getattr(type(module), "forward", None) is not nn.Module.forward
    return has_forward and not (hasattr(module, "encode") and hasattr(module, "decode"))


def _nbytes(module: nn.Module) -> int:
    tensors = {id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())
