"""What was changed in a model after it was offloaded: adapters added, modules wrapped or replaced.

Looked at when the model is called. What is new lives on the device; a tensor that has moved to
another module is followed there; one that took the place of another like it takes its home too.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from nvmeswap.offload.block import ManagedTensor
from nvmeswap.offload.layout import check_tensor
from nvmeswap.offload.passes import Passes
from nvmeswap.offload.units import Member, members_of
from nvmeswap.offload.window import Unit

_OWN_REFERENCES = 2  # the member's, and the argument of getrefcount


class StructureChanges:
    """Follows a model's structure. `known`: the tensors that live on the device already."""

    def __init__(self, model: nn.Module, units: list[Unit], residents: list[Member],
                 passes: Passes, device: torch.device) -> None:
        self._passes = passes
        self._device = device
        self._managed: dict[int, tuple[Unit, ManagedTensor]] = {
            id(managed.tensor): (unit, managed) for unit in units for _, managed in unit.tensors
        }
        # Strong references: an id must not be used again while the fingerprint has it.
        self._residents = {id(member.tensor): member.tensor for member in residents}
        self._fingerprint = _fingerprint(model)

    def catch_up(self, model: nn.Module) -> None:
        """Take in what has changed. Raises SwapUsageError for a tensor that can't be served."""
        fingerprint = _fingerprint(model)
        if fingerprint == self._fingerprint:
            return
        members = members_of(model)
        present = {id(member.tensor) for member in members}
        lost = {
            (id(module), attribute): (unit, managed)
            for key, (unit, managed) in self._managed.items()
            if key not in present
            for module, attribute in managed.member.places
        }
        for member in members:
            known = self._managed.get(id(member.tensor))
            if not member.is_buffer and not isinstance(member.tensor, nn.Parameter):
                continue  # torch.func.functional_call: for this call only
            if known is None and id(member.tensor) not in self._residents:
                known = self._replaced(member, lost)
                if known is None:
                    present.add(id(self._take_to_device(member)))
            if known is not None:
                unit, managed = known
                managed.member.places = member.places
                for module, _ in member.places:
                    self._passes.follow(module, [unit])
        self._residents = {
            key: tensor for key, tensor in self._residents.items() if key in present
        }
        self._fingerprint = _fingerprint(model)

    def _replaced(
        self, member: Member, lost: dict[tuple[int, str], tuple[Unit, ManagedTensor]]
    ) -> tuple[Unit, ManagedTensor] | None:
        """The home of the tensor whose place this one took, if it fits."""
        tensor = member.tensor
        for module, attribute in member.places:
            found = lost.get((id(module), attribute))
            if found is None or torch.is_inference(tensor):
                continue
            managed = found[1]
            place = managed.place
            if sys.getrefcount(managed.tensor) > _OWN_REFERENCES:
                continue  # somebody keeps the old one, and may put it back
            if tensor.is_meta or tensor.dtype is not place.dtype or tensor.shape != place.shape:
                continue
            if tensor.requires_grad and not managed.tensor.requires_grad:
                continue
            check_tensor(member.name, tensor)
            self._managed.pop(id(managed.tensor))
            self._managed[id(tensor)] = found
            managed.member = member
            managed.version = -1  # so that its values go to the home
            return found
        return None

    def _take_to_device(self, member: Member) -> torch.Tensor:
        """The tensor that lives there from now on: another one in its places, if it was made in
        inference mode and is elsewhere."""
        tensor = member.tensor
        if tensor.device != self._device and torch.is_inference(tensor):
            with torch.inference_mode(False):
                tensor = tensor.to(self._device, copy=True)
                if not member.is_buffer:
                    tensor = nn.Parameter(tensor, member.tensor.requires_grad)
            for module, attribute in member.places:
                setattr(module, attribute, tensor)
        elif tensor.device != self._device and not tensor.is_meta:
            check_tensor(member.name, tensor)
            tensor.data = tensor.data.to(self._device)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(self._device)
        self._residents[id(tensor)] = tensor
        return tensor


def _fingerprint(model: nn.Module) -> list[int]:
    """Changes when a module, a parameter or a buffer is added, moved or replaced."""
    found = []
    for module in model.modules():
        found.append(id(module))
        found.extend(map(id, module._parameters.values()))
        found.extend(map(id, module._buffers.values()))
    return found
