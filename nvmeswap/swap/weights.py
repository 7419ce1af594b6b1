"""Weights in safetensors files, read piece by piece.

A file by itself, or a folder of them as Hugging Face saves large models: with an index of which
file has which tensor, or without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.swap.state_file import StateFileReader, TensorShape

_INDEX = "*.safetensors.index.json"
# Elements read at a time where they are converted: what that takes besides the result.
_PIECE_NUMEL = 1 << 18


class Weights:
    """The tensors of some files, by name. Only headers are read before `read` is called.

    Args: `path`, a .safetensors file or a folder of such.
    Raises: SwapUsageError (no such file or folder, none in it, several indices), SwapManifestError
    (two files have one name; a file lacks what the index promises; `field` is the name; a damaged
    file), SwapPathError, SwapReadError.
    Blocking: reads headers; `read` waits for the drive. Threads: any may read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files, promised = _files(self.path)
        self._readers: dict[str, StateFileReader] = {}
        self._opened: list[StateFileReader] = []
        try:
            for file in files:
                self._open(file, promised)
        except BaseException:
            self.close()
            raise
        for name, file in promised.items():
            if name not in self._readers:
                raise SwapManifestError(
                    f"{name!r} is not in the file that the index names",
                    field=name, path=file, fix="save or download the folder again",
                )

    def _open(self, path: Path, promised: Mapping[str, Path]) -> None:
        reader = StateFileReader(path)
        self._opened.append(reader)
        for name in reader.tensors:
            if promised and promised.get(name) != path:
                continue  # the index gives it to another file, or does not know it
            other = self._readers.setdefault(name, reader)
            if other is not reader:
                raise SwapManifestError(
                    f"{name!r} is in {other.path.name} as well",
                    field=name, path=path, fix="leave one of the files out of the folder",
                )

    @property
    def tensors(self) -> dict[str, TensorShape]:
        """What there is, by name."""
        return {name: reader.tensors[name] for name, reader in self._readers.items()}

    def file_of(self, name: str) -> Path:
        """The file that has it; of an unknown one, where it was looked for."""
        reader = self._readers.get(name)
        return self.path if reader is None else reader.path

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (contiguous, any dtype and device) with the elements from `start` on, counted
        flat, converted to its dtype."""
        reader, flat = self._readers[name], out.view(-1)
        for begin in range(0, flat.numel(), _PIECE_NUMEL):
            piece = flat[begin : begin + _PIECE_NUMEL]
            first = start + begin
            piece.copy_(reader.read(name, first, first + piece.numel()))

    def close(self) -> None:
        """Idempotent."""
        for reader in self._opened:
            reader.close()


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def names_in_files(model: nn.Module, weights: Weights) -> dict[int, str]:
    """For the id of each parameter and persistent buffer its name in the files; of tied names, the
    first one that is there.

    Raises SwapManifestError, its `field` the name, for one that the files or the model lack, whose
    shape differs, or that is an integer on one side only (as quantised weights are).
    """
    stored = weights.tensors
    found: dict[int, str] = {}
    missing: dict[int, str] = {}
    unexpected = dict.fromkeys(stored)
    for name, tensor in tensors_to_load(model):
        unexpected.pop(name, None)
        if id(tensor) in found:
            continue
        if name not in stored:
            missing.setdefault(id(tensor), name)
            continue
        there, here = stored[name], TensorShape(tensor.dtype, tuple(tensor.shape))
        if there.shape != here.shape or (
            there.dtype.is_floating_point != here.dtype.is_floating_point
        ):
            raise SwapManifestError(
                f"{name} is {there.dtype} {there.shape} in the file, {here.dtype} {here.shape} in "
                "the model",
                field=name, path=weights.file_of(name), fix="give the weights of this very model",
            )
        found[id(tensor)] = name
    lacking = [name for key, name in missing.items() if key not in found]
    if lacking:
        _refuse_names("the files lack", lacking, weights.path)
    if unexpected:
        names = list(unexpected)
        _refuse_names("the model lacks", names, weights.file_of(names[0]))
    return found


def tensors_to_load(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, by all names, tied ones included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in {**module._parameters, **saved}.items():
            if tensor is not None:
                yield plain_name(f"{prefix}.{name}" if prefix else name), tensor


def _refuse_names(who: str, names: list[str], path: Path) -> NoReturn:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise SwapManifestError(
        f"{who} {names[0]}{more}", field=names[0], path=path,
        fix="give the weights of this very model, under the names of its state_dict()",
    )


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files, and what an index says of where each tensor is (nothing without one)."""
    if path.is_file():
        return [path], {}
    indices = sorted(path.glob(_INDEX))
    if len(indices) > 1:
        raise SwapUsageError(
            f"the folder has {len(indices)} indices: "
            + ", ".join(index.name for index in indices),
            path=path, fix="give a folder with one model in it",
        )
    promised = _index(indices[0]) if indices else {}
    files = sorted(set(promised.values())) if promised else sorted(path.glob("*.safetensors"))
    if not files:
        raise SwapUsageError(
            "no safetensors file is there", path=path,
            fix="give a .safetensors file, or a folder that has some",
        )
    return files, promised


def _index(path: Path) -> dict[str, Path]:
    try:
        content = json.loads(path.read_text())
        return {str(name): path.parent / file for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SwapManifestError(
            f"the index can't be read: {error}", field="weight_map", path=path,
            fix="save or download the folder again",
        ) from error
