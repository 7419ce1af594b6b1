"""What a module returned: tensors in containers of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def nodes_of(output: Any) -> list[Any]:
    """The autograd nodes that made the tensors in a module's output, each once."""
    return list({t.grad_fn: None for t in tensors_in(output) if t.grad_fn is not None})


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and dataclasses, down to a depth of 8."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 8:
        return
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from tensors_in(inner, depth + 1)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)
