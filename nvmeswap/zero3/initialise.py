"""How a module that was built on the meta device gets its first values by drawing them.

It is initialised by the function that the user gave; or, in a model of transformers, by the model's
`_init_weights`; or by its own `reset_parameters`, also where `_init_weights` left something out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nvmeswap.errors import SwapError, SwapUsageError

Initialise = Callable[[nn.Module], Any]
Call = Callable[[], Any]

_PIECE_NUMEL = 1 << 20
_BLANK = 0xFF  # in every byte: NaN in all floating dtypes
_FIX = "give shard(initialise=...) a function that sets all parameters and buffers of each module"


class Initialiser:
    """Which calls initialise which module. `given`: the user's function, for all of them."""

    def __init__(self, model: nn.Module, given: Initialise | None) -> None:
        self._given = given
        self._of_transformers = {
            name: module
            for name, module in model.named_modules()
            if callable(getattr(module, "_init_weights", None)) and hasattr(module, "post_init")
        }

    def refuse_what_is_not_called(self, model: nn.Module) -> None:
        """Raise SwapUsageError for initialisers that a model built in memory would have called, and
        we would not."""
        if self._given is not None:
            return
        for name, module in model.named_modules():
            if not any(parameter.is_meta for parameter in module.parameters()):
                continue
            subject = f"{name or 'the model itself'} ({type(module).__name__})"
            if self._by_others(name) is not None:
                continue
            for its_own in ("_init_weights", "init_weights"):
                if callable(getattr(module, its_own, None)):
                    _refuse(subject, f"has {its_own}, which nobody calls here")
            has_own = any(True for _ in module.parameters(recurse=False)) or any(
                True for _ in module.buffers(recurse=False)
            )
            if callable(getattr(module, "reset_parameters", None)) and not has_own:
                _refuse(subject, "has reset_parameters for its children, which nobody calls here")

    def together(self, name: str, module: nn.Module) -> list[nn.Module]:
        """The module, and those that it initialises with itself."""
        if isinstance(module, nn.MultiheadAttention) and not self._by_others(name):
            return [module, module.out_proj]
        return [module]

    def calls(self, name: str, module: nn.Module) -> list[Call]:
        """What to call, one after the other until all is set; nothing if there is no way."""
        if self._given is not None:
            return [partial(self._given, module)]
        calls: list[Call] = []
        owner = self._by_others(name)
        if owner is not None:
            calls.append(partial(owner._init_weights, module))
        if isinstance(module, nn.MultiheadAttention):
            calls.append(partial(_reset_attention, module))
        elif callable(getattr(module, "reset_parameters", None)):
            calls.append(module.reset_parameters)  # type: ignore[arg-type]
        return calls

    def _by_others(self, name: str) -> Any:
        """The user's function, or the nearest model of transformers around a module; else None."""
        if self._given is not None:
            return self._given
        parts = name.split(".") if name else []
        for count in range(len(parts), -1, -1):
            owner = self._of_transformers.get(".".join(parts[:count]))
            if owner is not None:
                return owner
        return None


def _reset_attention(module: nn.MultiheadAttention) -> None:
    module.out_proj.reset_parameters()  # as its constructor does, before its own
    module._reset_parameters()


def initialise_modules(
    name: str, modules: Sequence[nn.Module], calls: Sequence[Call], wanted: Collection[int]
) -> dict[int, Tensor]:
    """Initialise modules that belong together, `name` the first one's, as if all they have were
    ordinary tensors in host memory; they are left as they were. Returns the values by the id of the
    parameter or buffer that they are for.

    `wanted`: the ids of what must be set. Raises SwapUsageError where something of that is not,
    where another module's parameter is written, or for whatever a call raises.
    """
    subject = f"{name or 'the model itself'} ({type(modules[0]).__name__})"
    others = {
        inner: (parameter, parameter._version)
        for inner, parameter in modules[0].named_parameters()
        if not any(parameter is own for module in modules for own in _tensors(module))
    }
    with torch.no_grad(), _stand_ins(modules) as places:
        for call in calls:
            try:
                call()
            except SwapError:
                raise
            except Exception as error:
                _refuse(subject, f"can't be initialised: {error!r}", error)
            if not any(id(place.tensor) in wanted and place.is_unset for place in places):
                break
        for place in places:
            if id(place.tensor) in wanted and place.is_unset:
                _refuse(subject, f"is initialised, but {place.name} has no values yet")
        for inner, (parameter, version) in others.items():
            if parameter._version != version:
                _refuse(subject, f"writes {inner} while it is initialised, another module's")
        return {
            id(place.tensor): value for place in places if (value := place.value) is not None
        }


def _refuse(subject: str, what: str, cause: BaseException | None = None) -> NoReturn:
    raise SwapUsageError(f"{subject} {what}", fix=_FIX) from cause


def refuse_without_initialiser(name: str, module: nn.Module) -> NoReturn:
    """Raise SwapUsageError: there is no way to give it values."""
    _refuse(
        f"{name or 'the model itself'} ({type(module).__name__})",
        "is on the meta device and has no reset_parameters",
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


class _Place:
    """Where a module has a tensor, while an ordinary one stands there."""

    def __init__(self, table: dict[str, Any], name: str, blanks: dict[int, Tensor]) -> None:
        self.name = name
        self.tensor: Tensor = table[name]
        self._table = table
        blank = blanks.get(id(self.tensor))
        if blank is None:
            blank = blanks[id(self.tensor)] = _blank_for(self.tensor)
        self._blank, self._version = blank, blank._version
        table[name] = blank

    @property
    def value(self) -> Tensor | None:
        value: Tensor | None = self._table.get(self.name)
        return value

    @property
    def is_unset(self) -> bool:
        value = self.value
        if value is None or value.is_meta or value.shape != self.tensor.shape:
            return True
        pieces = value.detach().reshape(-1).split(_PIECE_NUMEL)
        if value.is_floating_point() or value.is_complex():
            return any(bool(_is_nan(piece).any()) for piece in pieces)
        if value is not self._blank or value._version != self._version:
            return False
        return value.numel() > 0 and all(bool((_bytes(piece) == _BLANK).all()) for piece in pieces)

    def restore(self) -> None:
        self._table[self.name] = self.tensor


@contextmanager
def _stand_ins(modules: Sequence[nn.Module]) -> Iterator[list[_Place]]:
    places: list[_Place] = []
    blanks: dict[int, Tensor] = {}
    try:
        for module in modules:
            for table in (module._parameters, module._buffers):
                names = [name for name, tensor in table.items() if tensor is not None]
                places += [_Place(table, name, blanks) for name in names]
        yield places
    finally:
        for place in places:
            place.restore()


def _blank_for(tensor: Tensor) -> Tensor:
    """In host memory; a real buffer's copy, else something that shows whether it was set."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if not is_parameter and not tensor.is_meta:
        return tensor.detach().to("cpu", copy=True)
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    _bytes(blank).fill_(_BLANK)
    if is_parameter:
        return nn.Parameter(blank, requires_grad=tensor.requires_grad)
    return blank


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _is_nan(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.itemsize == 1 else tensor).isnan()
