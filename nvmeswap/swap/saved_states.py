"""An optimizer's state as one safetensors file.

Tensors are called `state.<number>.<name>`, with the numbers that torch's state_dict gives to
parameters; the metadata has the param_groups and what is no tensor as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.swap.state_file import StateFileReader, StateFileWriter, TensorShape
from nvmeswap.swap.states import Source

_FORMAT = "nvmeswap.optimizer/1"
Take = Callable[[str, str, int, torch.Tensor], None]


def save_states(
    path: Path,
    packed: Mapping[str, Any],
    dtypes: Mapping[str, Mapping[str, torch.dtype]],
    places: Mapping[str, tuple[int, tuple[int, ...]]],
    stream: Callable[[Take], None],
) -> None:
    """Write the file. `packed` is a state_dict without dense states; `dtypes` and `places` are the
    dense ones' by key: by name, and the parameter's number and shape; `stream` gives the values.

    Raises SwapUsageError for options that JSON can't hold, and what `StateFileWriter` raises.
    """
    tensors = {
        _name(places[key][0], name): TensorShape(dtype, places[key][1])
        for key, names in dtypes.items()
        for name, dtype in names.items()
    }
    scalars: dict[str, dict[str, Any]] = {}
    small: dict[str, torch.Tensor] = {}
    for number, state in packed["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                small[_name(number, name)] = value.detach().cpu()
            else:
                scalars.setdefault(str(number), {})[name] = value
    tensors |= {name: TensorShape(v.dtype, tuple(v.shape)) for name, v in small.items()}
    metadata = {
        "format": _FORMAT,
        "param_groups": _json(packed["param_groups"]),
        "scalars": _json(scalars),
        "started": _json(sorted(number for number, _ in places.values())),
    }
    with StateFileWriter(path, tensors, metadata) as file:
        for name, value in small.items():
            file.write(name, 0, value.reshape(-1))
        stream(lambda key, name, start, values: file.write(
            _name(places[key][0], name), start, values
        ))


class SavedStates:
    """A file that `save_states` wrote, open: `states` by number and name, dense ones as sources;
    `param_groups`."""

    def __init__(self, path: Path) -> None:
        self._file = StateFileReader(path)
        try:
            self._parse(path, self._file.metadata)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            self._file.close()
            raise SwapManifestError(
                "the optimizer state is damaged",
                path=path,
                field="metadata",
                fix="give the file that optimizer.save wrote",
            ) from error
        except SwapManifestError:
            self._file.close()
            raise

    def _parse(self, path: Path, metadata: Mapping[str, str]) -> None:
        if metadata.get("format") != _FORMAT:
            raise SwapManifestError(
                "this is no optimizer state of ours",
                path=path,
                field="format",
                fix="give the file that optimizer.save wrote",
            )
        self.param_groups: list[dict[str, Any]] = json.loads(metadata["param_groups"])
        self.states: dict[int, dict[str, Source | Any]] = {
            number: {} for number in json.loads(metadata["started"])
        }
        for number, scalars in json.loads(metadata["scalars"]).items():
            self.states[int(number)].update(scalars)
        for full_name, shape in self._file.tensors.items():
            _, number, name = full_name.split(".", 2)
            self.states.setdefault(int(number), {})[name] = Source(
                shape.shape, partial(self._file.read, full_name)
            )

    def __enter__(self) -> SavedStates:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _name(number: int, name: str) -> str:
    return f"state.{number}.{name}"


def _json(value: Any) -> str:
    """Of plain values; a 0-dim tensor (a learning rate) counts as its number."""

    def plain(odd: Any) -> Any:
        if isinstance(odd, torch.Tensor) and odd.numel() == 1:
            return odd.item()
        raise SwapUsageError(
            f"an option of type {type(odd).__name__} can't be saved to a file",
            fix="save optimizer.state_dict() with torch.save, or remove it from the param_groups",
        )

    return json.dumps(value, default=plain)
