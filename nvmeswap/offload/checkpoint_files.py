"""Modules without values, and their values from safetensors files, a piece at a time.

A checkpoint larger than memory is never whole in it: a skeleton is built on the meta device, and
what is read goes straight to where it is to live.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nvmeswap.errors import SwapManifestError
from nvmeswap.swap.weights import Weights, names_in_files, tensors_to_load

_FILLED_LATER = frozenset({
    torch.empty, torch.empty_strided, torch.rand, torch.randn, torch.normal, torch.randint,
})



class _FilledLater(TorchFunctionMode):
    """What is made to be filled, or filled at random, is made on the meta device.

    Under `torch.device("meta")` all would be: also what a constructor computes and no checkpoint
    has, such as the frequencies of rotary embeddings. Of this thread alone.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLED_LATER:
            kwargs = {**(kwargs or {}), "device": "meta", "pin_memory": False}
            kwargs.pop("generator", None)
        return func(*args, **(kwargs or {}))


def build_skeleton(build: Callable[[], object], dtype: torch.dtype | None) -> object:
    """What `build()` returns, its weights without values. If it is a module, floating-point
    parameters and persistent buffers get `dtype`; buffers that no checkpoint has keep theirs."""
    with _FilledLater():
        built = build()
    if dtype is not None and isinstance(built, nn.Module):
        for _, tensor in tensors_to_load(built):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return built


class CheckpointFiles:
    """A skeleton's values in safetensors files: one file, or a folder of them.

        with CheckpointFiles(module, path) as files:
            files.read("decoder.weight", 0, piece)      # of the names in the module

    Raises: SwapManifestError (`field` is the name) for a tensor that the files or the module lack,
    or that differs in shape, and for a buffer that no checkpoint saves and that has no value yet;
    otherwise as `Weights`. Blocking: reads headers, and the values of what is not on the meta
    device. Threads: any may read.
    """

    def __init__(self, module: nn.Module, path: str | Path) -> None:
        self._weights = Weights(path)
        try:
            self._saved = names_in_files(module, self._weights)
            self._tensors: dict[str, Tensor] = {
                **dict(module.named_parameters(remove_duplicate=False)),
                **dict(module.named_buffers(remove_duplicate=False)),
            }
            for name, tensor in self._tensors.items():
                if tensor.is_meta and id(tensor) not in self._saved:
                    raise SwapManifestError(
                        f"{name} has no value: no checkpoint saves it, and it was built on the "
                        "meta device",
                        field=name, path=path,
                        fix='compute it when the skeleton is built, on the device "cpu", or make '
                        "it a persistent buffer",
                    )
            with torch.no_grad():
                for name, tensor in self._tensors.items():
                    if id(tensor) in self._saved and not tensor.is_meta:
                        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        self.read(name, 0, values)
                        tensor.copy_(values)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (contiguous) with the elements from `start` on, counted flat, of the module's
        tensor `name`, converted to the dtype of `out`."""
        self._weights.read(self._saved[id(self._tensors[name])], start, out)

    def close(self) -> None:
        """Idempotent."""
        self._weights.close()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
