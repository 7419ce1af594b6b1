"""How a tensor lies in memory, and whether that is how it is stored: then its own memory is moved,
at the cost of a few questions. All others pass through a dense tensor on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.store.manifest import TensorSpec

NOWHERE = 1 << 63  # behind all that has a place
# What such a tensor says of itself holds for its memory; another subclass may have none.
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_layout_of = attrgetter("dtype", "shape", "device")


@dataclass(slots=True)
class StoredTensor:
    """A tensor on NVMe: `key_count` keys share it when they are tied.

    `layout`: what `_layout_of` says of tensors whose memory is the stored bytes, if they are
    contiguous. None where more has to be asked: also while keys are tied, and ever after. (Of
    dimensions of size 1 the stride means nothing; those of the first tensor are kept.)
    `is_in_parts`: it was written part by part, so that parts can be read with their checksums.
    """

    name: str
    spec: TensorSpec
    device: torch.device
    layout: tuple[object, ...] | None
    offset_bytes: int = NOWHERE
    key_count: int = 1
    is_in_parts: bool = False

    @classmethod
    def like(cls, name: str, dense: torch.Tensor, device: torch.device) -> StoredTensor:
        """Of a dense tensor on any device; what is read again is for `device`."""
        spec = TensorSpec(dense.dtype, tuple(dense.shape), tuple(dense.stride()))
        plain = dense.is_contiguous() and not dense.is_complex()
        return cls(name, spec, device, (spec.dtype, spec.shape, device) if plain else None)

    def new_tensor(self) -> torch.Tensor:
        """An uninitialised one, as it will be read again."""
        spec = self.spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self.device)


def fit(stored: Sequence[StoredTensor | None], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Of each tensor: is its own memory what is stored, so that it can be moved as it is?"""
    if _all_fit(stored, tensors):
        return [True] * len(tensors)
    return [_all_fit([each], [tensor]) for each, tensor in zip(stored, tensors, strict=True)]


def _all_fit(stored: Sequence[StoredTensor | None], tensors: Sequence[torch.Tensor]) -> bool:
    # Each question is put to all of them by C, which takes less time than a loop over them.
    try:
        return (
            [each and each.layout for each in stored] == list(map(_layout_of, tensors))
            and PLAIN_TYPES.issuperset(map(type, tensors))
            and all(map(torch.Tensor.is_contiguous, tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
        )
    except RuntimeError:
        return False  # some layouts can't be asked


def ties_of(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, str]:
    """Of each tensor that is the same memory as one before it, that one's key."""
    try:
        places = set(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return {}  # one has no memory; it is refused where it is named
    if len(places) == len(tensors):
        return {}
    owners: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        if tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            owner = owners.setdefault(place, key)
            if owner != key:
                ties[key] = owner
    return ties


def on_host(key: str, tensor: torch.Tensor, *, pin_memory: bool = False) -> torch.Tensor:
    """A dense CPU tensor with the same elements: itself, if it is one. `pin_memory`: what comes
    from a GPU gets page-locked memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise SwapUsageError(
            f"{key}: only dense tensors with data can be swapped out",
            fix="swap its parts (indices, values, scales) one by one",
        )
    dense = _dense(tensor)
    if not dense.is_cuda or not pin_memory:
        return dense.to("cpu")
    return torch.empty_strided(
        dense.shape, dense.stride(), dtype=dense.dtype, device="cpu", pin_memory=True
    ).copy_(dense)


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """What `on_host` would give, without the elements: a meta tensor."""
    strides = tensor.stride() if _is_dense(tensor) else None
    if strides is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def host_for(stored: StoredTensor, out: torch.Tensor) -> torch.Tensor:
    """A dense CPU tensor to read into, to be copied to `out`: itself, if it is one."""
    as_stored = out.is_cpu and out.stride() == stored.spec.stride
    if as_stored and not out.is_neg() and not out.is_conj():
        return out
    spec = stored.spec
    return torch.empty_strided(
        spec.shape, spec.stride, dtype=spec.dtype, device="cpu", pin_memory=out.is_cuda
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Without gaps and overlaps in memory; the stride is kept if it has none (channels_last,
    transposed), else it becomes contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if _is_dense(tensor) else tensor.contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(dense: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, in its order."""
    return torch.as_strided(dense, (dense.numel(),), (1,))


def check_out(key: str, spec: TensorSpec, out: torch.Tensor) -> None:
    if out.is_meta or any(
        stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)
    ):
        raise SwapUsageError(
            f"{key} can't be read into an `out` without memory of its own for each element",
            fix="give a tensor that is neither expanded nor meta",
        )
    for field, stored, given in (
        ("dtype", spec.dtype, out.dtype),
        ("shape", spec.shape, tuple(out.shape)),
    ):
        if stored != given:
            raise SwapManifestError(
                f"{key} is stored with {field} {stored}, not {given}",
                field=field,
                fix="give an `out` like the stored tensor",
            )


def copy_into(out: torch.Tensor, host: torch.Tensor) -> None:
    """What was read, into a tensor of another layout or device; a parameter too."""
    with torch.no_grad():
        out.copy_(host)
