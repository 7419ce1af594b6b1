"""`lazy`: a module that is loaded when it is first used, and whose values leave the device again.

`LazyModule` stands in for the module; all that it does is to ask its `Component` (component.py) for
what the call at hand needs.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from nvmeswap.errors import SwapUsageError
from nvmeswap.offload.component import Component, Recipe
from nvmeswap.offload.manager import OffloadManager
from nvmeswap.stats import OffloadStats

_CONVERSIONS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
    "double": torch.float64,
}
_PLACING = frozenset({"to", "cuda", "cpu", *_CONVERSIONS})
_OF_MANAGER = frozenset({"state_dict", "load_state_dict"})
# nn.Module's own methods for which no value is needed.
_WITHOUT_VALUES = frozenset(
    "train eval requires_grad_ compile extra_repr register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook".split()
)


def lazy(
    loader: Callable[[], object],
    device: torch.device | str = "cuda",
    *,
    name: str | None = None,
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """A stand-in for the module that `loader()` returns, which is called at the first need.

        vae = nvmeswap.lazy(load_vae, path="/mnt/nvme")
        vae.config.latent_channels                # runs the loader, if it did not run yet
        image = vae.decode(latents)               # brings the values to the device
        vae.release()                             # and back; the module stays, with all changes

    It behaves as the module: calls, attributes, methods, isinstance. Calls and methods of the
    module's own class bring its values to the device, where they stay until `release()`; attributes
    bring nothing. `load()`, `prefetch()` (loads in a thread), `release()`, `close()` and `stats()`
    are the stand-in's own, and hide methods of that name.

    Args: `name`, for messages. `checkpoint`, a .safetensors file or a folder of them: `loader` then
    builds the module without values, which go from the files to their home a piece at a time, so
    that a checkpoint may be larger than memory; floating-point weights become `dtype` on the way.
    `options` are those of OffloadManager: `path` (NVMe; else host memory), `max_in_cpu` and others.
    Unless `trainable` is one of them, the module's parameters are frozen (requires_grad_(False)):
    what is trained can't come and go as a whole.
    Raises: SwapUsageError here for arguments that contradict each other, TypeError for options that
    OffloadManager does not have; SwapUsageError at the first need if `loader` returns no module;
    what `loader` and OffloadManager raise; SwapManifestError if files and module differ.
    Blocking: not here; loads wait for the drive. Threads: any; calls wait for each other.
    """
    if dtype is not None and checkpoint is None:
        raise SwapUsageError(
            "dtype is for what is read from a checkpoint", fix="convert the module in the loader"
        )
    inspect.signature(OffloadManager).bind(None, device, **options)
    recipe = Recipe(
        name=name or str(getattr(loader, "__name__", type(loader).__name__)),
        build=loader,
        device=_with_index(torch.device(device)),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        dtype=dtype,
        options=options,
    )
    return LazyModule(Component(recipe))


def _with_index(device: torch.device) -> torch.device:
    """The current device is one thread's; loads run in others too."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class LazyModule:
    """Made by `lazy`; see there."""

    __slots__ = ("__weakref__", "_lazy_component")
    _lazy_component: Component

    def __init__(self, component: Component) -> None:
        object.__setattr__(self, "_lazy_component", component)

    # --- its own ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Bring all values to the device, and wait for them."""
        self._lazy_component.load()

    def prefetch(self) -> None:
        """The same in a thread, if the loader ran already or there is a checkpoint."""
        self._lazy_component.build_skeleton()
        self._lazy_component.load_ahead(to_device=True)

    def release(self) -> None:
        """Take all values from the device; changes of them are kept."""
        self._lazy_component.release()

    def close(self) -> None:
        """Give up memory, files and the module. Idempotent."""
        self._lazy_component.close()

    def stats(self) -> OffloadStats:
        """The manager's; stores the values first, if they are nowhere yet."""
        return self._lazy_component.manager().stats()

    # --- the module's -----------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lazy_component.in_use() as module:
            result = module(*args, **kwargs)
            return self if result is module else result

    def __getattr__(self, name: str) -> Any:
        component = self._lazy_component
        module = component.module()
        if name == "device":
            return component.recipe.device  # and not where the values happen to be
        if name in _PLACING:
            return functools.partial(self._place, name)
        value = getattr(module, name)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return self._method(name)
        if isinstance(value, (Tensor, nn.Module)):
            component.manager()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        component = self._lazy_component
        if isinstance(value, (Tensor, nn.Module)):
            component.manager()
        setattr(component.module(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._lazy_component.module(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._lazy_component.module())

    def __dir__(self) -> list[str]:
        return dir(self._lazy_component.module())

    def __repr__(self) -> str:
        component = self._lazy_component
        state = "loaded" if component.is_loaded else "not loaded"
        return f"<lazy {component.name} on {component.recipe.device}, {state}>"

    def __len__(self) -> int:
        return len(self._sized())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sized())

    def __contains__(self, item: object) -> bool:
        return item in self._sized()

    def __getitem__(self, key: Any) -> Any:
        return self._sized()[key]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SwapUsageError(
            f"{self._lazy_component.name} is lazy, and can't be copied or pickled",
            fix="save its state_dict(), or make another one by lazy()",
        )

    # --- inside -----------------------------------------------------------------------------------

    def _sized(self) -> Any:
        self._lazy_component.manager()
        return self._lazy_component.module()

    def _method(self, name: str) -> Callable[..., Any]:
        component = self._lazy_component
        module = component.module()
        if name in _OF_MANAGER:
            component.release()  # which the manager would do, and tell nobody
            return cast("Callable[..., Any]", getattr(component.manager(), name))
        computes = name == "forward" or not hasattr(nn.Module, name)

        @functools.wraps(getattr(module, name))
        def call(_: LazyModule, *args: Any, **kwargs: Any) -> Any:
            if computes:
                with component.in_use():
                    return self._itself(getattr(module, name)(*args, **kwargs))
            if name not in _WITHOUT_VALUES:
                component.manager()
            return self._itself(getattr(module, name)(*args, **kwargs))

        return types.MethodType(call, self)

    def _itself(self, result: Any) -> Any:
        return self if result is self._lazy_component.module() else result

    def _place(self, name: str, *args: Any, **kwargs: Any) -> LazyModule:
        """`to` and its kin: to its device (nothing to do yet), to the CPU (released); else refused.
        """
        component = self._lazy_component
        here = component.recipe.device
        if name in _CONVERSIONS:
            device, dtype = None, _CONVERSIONS[name]
        elif name == "to":
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        else:
            device, dtype = torch.device(name, *args, **kwargs), None
        tensors = [*component.module().parameters(), *component.module().buffers()]
        if dtype is not None and any(t.is_floating_point() and t.dtype != dtype for t in tensors):
            raise SwapUsageError(
                f"{component.name} can't be converted to {dtype} any more",
                fix="convert it in the loader; of a checkpoint, give dtype= to lazy()",
            )
        if device is None or _with_index(device) == here:
            return self
        if device.type != "cpu":
            raise SwapUsageError(
                f"{component.name} is for {here} and can't be moved to {device}",
                fix="give the device to lazy()",
            )
        component.release()
        return self
