"""Gradients in host memory, as they come, until the optimizer has used them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostGradients:
    """One flat gradient for each key, added up over micro-batches in order of arrival.

    A gradient on the host is kept as it is (no copy; the first one of a boundary is adopted). One
    on a GPU is copied to the memory given by `use_memory`, asynchronously on the current stream.

    Threads: one at a time for a key; with updates during backward one adds while another takes what
    is final. Adding happens in the gradient's own dtype, as torch's `grad += new`.
    """

    def __init__(self) -> None:
        self._host_memory: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._arrived: dict[str, torch.cuda.Event] = {}
        self._devices: dict[str, torch.device] = {}  # where each gradient came from
        self._norm_type: float | None = None  # of the norms that are taken on arrival
        self._norms: dict[str, torch.Tensor] = {}

    def use_memory(self, host_memory: dict[str, torch.Tensor]) -> None:
        """Page-locked tensors, flat, by key, for gradients that come from a GPU."""
        self._host_memory = host_memory

    def add(self, key: str, gradient: torch.Tensor) -> None:
        """Add a gradient (flat or shaped, any device) for `key`; on a GPU it may still be copied on
        return, and its memory must not be reused before the current stream has passed this
        point."""
        flat = gradient.detach().reshape(-1)
        held = self._gradients.get(key)
        self._devices[key] = flat.device
        if held is not None:
            self._wait(key)
            held.add_(flat.to("cpu", held.dtype))
        elif flat.is_cuda:
            memory = self._host_memory.get(key)
            host = torch.empty_like(flat, device="cpu") if memory is None else memory
            host.copy_(flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arrived[key] = event
            self._gradients[key] = host
        else:
            self._gradients[key] = flat
        if self._norm_type is None or not flat.numel():
            return
        if held is not None and flat.is_cuda:
            self._norms.pop(key, None)
        else:  # while it is in the cache, or still on the GPU
            self._norms[key] = norm_of(flat if held is None else held, self._norm_type)

    def __contains__(self, key: str) -> bool:
        return key in self._gradients

    def get(self, key: str) -> torch.Tensor | None:
        """The sum so far, flat in host memory, or None; waits for a copy under way."""
        self._wait(key)
        return self._gradients.get(key)

    def dtype(self, key: str) -> torch.dtype:
        """Of a gradient that is there."""
        return self._gradients[key].dtype

    def norms(self, keys: Iterable[str], norm_type: float) -> list[torch.Tensor]:
        """The norm of each gradient (0 for an empty one), where it was taken on arrival that one.
        Once asked, they are taken on arrival. Each is computed where the gradient came from, since
        a GPU rounds otherwise than the host."""
        if norm_type != self._norm_type:
            self._norm_type, self._norms = norm_type, {}
        zero = torch.zeros((), device="cpu")
        found = []
        for key in keys:
            gradient = self._gradients[key]
            norm = self._norms.get(key)
            if norm is None:
                self._wait(key)
                there = gradient.to(self._devices[key], non_blocking=True)
                norm = norm_of(there, norm_type) if gradient.numel() else zero
            found.append(norm)
        return found

    def was_edited(self, key: str) -> None:
        """Somebody wrote to what `get` gave."""
        self._norms.pop(key, None)

    def scale(self, key: str, scale: torch.Tensor) -> None:
        """Multiply a gradient."""
        self._wait(key)
        gradient = self._gradients[key]
        gradient.mul_(scale.to(gradient.dtype))
        self._norms.pop(key, None)

    def unscale(
        self, keys: Iterable[str], inverse_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Multiply the gradients of `keys` by `inverse_scale`, as torch.amp.GradScaler does;
        `found_inf` becomes 1 if one of their values is not finite."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for key in keys:
            self._wait(key)
            self._norms.pop(key, None)
            gradient = self._gradients[key]
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)

    def clear(self, keys: Iterable[str] | None = None) -> None:
        """Forget the gradients of `keys`, None: of all."""
        for key in self._held(keys):
            self._wait(key)
            del self._gradients[key]
            self._norms.pop(key, None)

    def zero(self, keys: Iterable[str] | None = None) -> None:
        """Make the gradients of `keys` zero in place, None: of all."""
        for key in self._held(keys):
            self._wait(key)
            self._gradients[key].zero_()
            self._norms.pop(key, None)

    def _held(self, keys: Iterable[str] | None) -> list[str]:
        return [
            key for key in (self._gradients if keys is None else keys) if key in self._gradients
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients held."""
        gradients = list(self._gradients.values())  # they may leave meanwhile, if backward updates
        return sum(gradient.nbytes for gradient in gradients)

    def _wait(self, key: str) -> None:
        event = self._arrived.pop(key, None)
        if event is not None:
            event.synchronize()


def norm_of(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """By the kernel that torch's clip_grad_norm_ takes: on a GPU others round otherwise."""
    norm: torch.Tensor = torch._foreach_norm([gradient], norm_type)[0]
    return norm
