"""From a model and settings to units with homes: what `OffloadManager` does once, at its start."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapChecksumError, SwapConfigError, SwapUsageError
from nvmeswap.memory.budget import available_host_memory
from nvmeswap.memory.heap import release_freed_memory
from nvmeswap.offload.block import Block, ManagedTensor, altered
from nvmeswap.offload.homes import NVME_ALIGNMENT_NBYTES, Homes, kept_in_ram
from nvmeswap.offload.layout import (
    TENSOR_ALIGNMENT_NBYTES,
    BlockLayout,
    check_tensor,
    give_data,
    lay_out,
)
from nvmeswap.offload.storage import SparePages
from nvmeswap.offload.units import Granularity, Member, UnitCut, cut_into_units, members_of
from nvmeswap.offload.window import Unit

_log = logging.getLogger(__name__)
# Smaller buffers stay in host memory between uses, whatever the tier: they change with each use.
SMALL_BUFFER_NBYTES = 1 << 20
# Fills a flat tensor on the host with the elements of a tensor, by name, from one on.
Values = Callable[[str, int, torch.Tensor], None]
# Freed memory goes back to the system whenever it is so much.
_RELEASE_NBYTES = 8 << 20
_PIECE_NUMEL = 4 << 20  # arbitrary: what a reader of checkpoints holds at a time


@dataclass(frozen=True, slots=True)
class Settings:
    """As the arguments of `OffloadManager` say."""

    device: torch.device
    tier: Literal["cpu", "nvme"]
    path: str | Path | None
    trainable: Literal["resident", "cpu", "nvme"] | None  # None: as `trained_tier` says
    granularity: Granularity
    prefetch: int
    keep_resident_bytes: int
    max_in_cpu: int
    buffer_count: int | None  # None: `slot_count` says it
    pin_memory: bool
    buffers: Literal["swap", "resident"]
    swap: SwapBlock
    aio: AioConfig
    is_pass_through: bool = False  # one memory for host and device: everything is resident

    def __post_init__(self) -> None:
        for key, value, known in (
            ("tier", self.tier, ("cpu", "nvme")),
            ("trainable", self.trainable, (None, "resident", "cpu", "nvme")),
            ("buffers", self.buffers, ("swap", "resident")),
        ):
            if value not in known:
                raise SwapConfigError(
                    f"{key} is {value!r}", key=key,
                    fix="use one of " + ", ".join(filter(None, known)),
                )
        for key, count, least in (
            ("prefetch", self.prefetch, 0),
            ("keep_resident_bytes", self.keep_resident_bytes, 0),
            ("max_in_cpu", self.max_in_cpu, 0),
            ("buffer_count", 1 if self.buffer_count is None else self.buffer_count, 1),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise SwapConfigError(
                    f"{key} is {count!r}", key=key, fix=f"use a whole number from {least} on"
                )
        if "nvme" in (self.tier, self.trainable) and self.path is None:
            raise SwapConfigError(
                "something is to go to NVMe, and no path is given", key="path",
                fix="name an existing folder on the drive",
            )

        if self.is_pass_through and self.trainable == "nvme":
            raise SwapConfigError(
                f"{self.device} shares its memory with the host, where all of the model stays, and "
                'trainable is "nvme"',
                key="trainable", fix='use tier="nvme" as well, or unified_memory=False',
            )

    @property
    def slot_count(self) -> int:
        """Of each size, for what is read ahead: beside those that come, one in use and a spare."""
        return self.prefetch + 2 if self.buffer_count is None else self.buffer_count

    def is_resident(self, member: Member) -> bool:
        """Whether it lives on the device."""
        if self.is_pass_through:
            return True
        if member.is_buffer:
            return self.buffers == "resident"
        return member.tensor.requires_grad and self.trainable == "resident"

    def is_on_nvme(self, member: Member) -> bool:
        if member.is_buffer:
            return self.tier == "nvme" and member.tensor.nbytes > SMALL_BUFFER_NBYTES
        if member.tensor.requires_grad:
            return self.trainable == "nvme"
        return self.tier == "nvme"


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A tensor that was moved to the device for good."""

    member: Member
    first_device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """`needs`: the units that each module's forward uses; `from_meta`: ids of the tensors that had
    no values before."""

    units: list[Unit]
    needs: dict[nn.Module, list[Unit]]
    homes: Homes
    residents: list[Resident]
    spare: SparePages
    from_meta: frozenset[int]

    @property
    def trained(self) -> list[tuple[Unit, ManagedTensor]]:
        """What is not on the device between uses and gets gradients."""
        return [
            (unit, managed)
            for unit in self.units
            for _, managed in unit.tensors
            if managed.tensor.requires_grad and not managed.member.is_buffer
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _BlockPlan:
    name: str
    members: list[Member]
    layout: BlockLayout
    on_nvme: bool


def build(model: nn.Module, settings: Settings, values: Values | None) -> Built:
    """Moves the model's tensors to their homes, and what is resident to the device.

    `values` gives those of tensors on the meta device, by name. Raises before anything was moved,
    or moves it back.
    """
    members = members_of(model)
    for member in members:
        check_tensor(member.name, member.tensor)
    settings = replace(settings, trainable=_trained_tier(members, settings))
    by_storage = _by_storage(members)
    resident_ids = {
        id(member)
        for group in by_storage.values()
        if any(settings.is_resident(member) for member in group)
        for member in group
    }
    managed = [member for member in members if id(member) not in resident_ids]
    cuts = _together(cut_into_units(model, managed, settings.granularity), by_storage)
    plans = {cut: _block_plans(cut, settings) for cut in cuts}
    in_ram, on_nvme = _tiers([plan for group in plans.values() for plan in group])
    homes = Homes(
        in_ram=in_ram, on_nvme=on_nvme, path=settings.path,
        is_direct=settings.device.type == "cpu", buffer_count=settings.slot_count,
        pin_memory=settings.pin_memory and settings.device.type == "cuda",
        max_in_cpu=settings.max_in_cpu, swap=settings.swap, aio=settings.aio,
    )
    from_meta = frozenset(id(member.tensor) for member in members if member.tensor.is_meta)
    built = Built([], {}, homes, [], SparePages(), from_meta)
    freed_nbytes = 0
    try:
        for cut in cuts:
            unit = Unit(cut.name or "root", [])
            built.units.append(unit)
            _furnish(unit, plans[cut], homes, settings, values, built.spare)
            freed_nbytes += unit.nbytes
            if freed_nbytes >= _RELEASE_NBYTES:
                release_freed_memory()
                freed_nbytes = 0
        for group in by_storage.values():
            if id(group[0]) in resident_ids:
                built.residents.extend(Resident(each, _device(each.tensor)) for each in group)
                _move(group, settings.device, values)
    except BaseException:
        undo(built)
        homes.close()
        raise
    built.needs.update(_needs(cuts, built.units))
    _tell(built, settings)
    return built


def _tell(built: Built, settings: Settings) -> None:
    blocks = [block for unit in built.units for block in unit.blocks]
    _log.info(
        "offloaded for %s: %d units; %d bytes in host memory, %d on NVMe, %d always on the device; "
        'trained parameters: "%s"',
        settings.device, len(built.units),
        sum(block.nbytes for block in blocks if block.home.is_in_memory),
        sum(block.nbytes for block in blocks if not block.home.is_in_memory),
        sum(resident.member.tensor.nbytes for resident in built.residents), settings.trainable,
    )


def _trained_tier(
    members: Sequence[Member], settings: Settings
) -> Literal["resident", "cpu", "nvme"]:
    """Where trained parameters are if nothing is said: beside frozen weights they are adapters, and
    stay on the device; where all are trained, as in a model as it was built, they are the model."""
    if settings.trainable is not None:
        return settings.trainable
    parameters = [member.tensor for member in members if not member.is_buffer]
    if any(not parameter.requires_grad for parameter in parameters):
        return "resident"
    return settings.tier


def undo(built: Built) -> None:
    """As it was before `build`: what had no values has none again."""
    for member in [
        *(managed.member for unit in built.units for _, managed in unit.tensors),
        *(resident.member for resident in built.residents),
    ]:
        tensor = member.tensor
        if id(tensor) in built.from_meta and not tensor.is_meta:
            give_data(tensor, torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            ))
    restore_all(built)


def restore_all(built: Built) -> None:
    """Every tensor as it was before: in memory of its own, on its first device."""
    for unit in built.units:
        for block in unit.blocks:
            _give_back(block)
    first_devices = {id(each.member): each.first_device for each in built.residents}
    residents = [each.member for each in built.residents if not each.member.tensor.is_meta]
    for group in _by_storage(residents).values():
        device = first_devices[id(group[0])]
        if len(group) > 1:
            _move(group, device, None)
        for tensor in [member.tensor for member in group]:
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)


def refuse_to_restore_too_much(built: Built) -> None:
    """Raise SwapUsageError if what is on NVMe does not fit into memory."""
    nbytes = sum(
        block.nbytes for unit in built.units for block in unit.blocks
        if not block.home.is_in_memory
    )
    if not nbytes:
        return
    room = available_host_memory()
    if nbytes > room.available_nbytes:
        raise SwapUsageError(
            f"{nbytes:_} bytes are on NVMe, and {room.limit} leaves {room.available_nbytes:_}",
            fix="close(restore=False) leaves the tensors mapped from their file",
        )


def can_restore(built: Built) -> bool:
    """Whether it fits; warns if it does not."""
    try:
        refuse_to_restore_too_much(built)
    except SwapUsageError as refusal:
        warnings.warn(str(refusal), stacklevel=3)
        return False
    return True


def _device(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _by_storage(members: Sequence[Member]) -> dict[int, list[Member]]:
    groups: dict[int, list[Member]] = {}
    for index, member in enumerate(members):
        tensor = member.tensor
        key = -1 - index if tensor.is_meta else tensor.untyped_storage()._cdata
        groups.setdefault(key, []).append(member)
    return groups


def _together(cuts: list[UnitCut], by_storage: dict[int, list[Member]]) -> list[UnitCut]:
    """What shares a storage goes to the unit of the first of them."""
    for group in by_storage.values():
        if len(group) > 1:
            homes = [cut for cut in cuts if any(member in cut.members for member in group)]
            for cut in homes[1:]:
                for member in [member for member in cut.members if member in group]:
                    cut.members.remove(member)
                    homes[0].members.append(member)
    return [cut for cut in cuts if cut.members]


def _block_plans(cut: UnitCut, settings: Settings) -> list[_BlockPlan]:
    groups = _by_storage(cut.members).values()
    on_nvme = [group for group in groups if all(settings.is_on_nvme(member) for member in group)]
    in_ram = [group for group in groups if group not in on_nvme]
    plans = []
    for kind, chosen in (("nvme", on_nvme), ("ram", in_ram)):
        members = [member for group in chosen for member in group]
        if members:
            is_updated = kind == "nvme" and any(
                member.tensor.requires_grad and not member.is_buffer for member in members
            )
            alignment = NVME_ALIGNMENT_NBYTES if is_updated else TENSOR_ALIGNMENT_NBYTES
            layout = lay_out([member.tensor for member in members], alignment_nbytes=alignment)
            name = f"{cut.name or 'root'}:{kind}"
            plans.append(_BlockPlan(name, members, layout, kind == "nvme"))
    return plans


def _tiers(plans: Sequence[_BlockPlan]) -> tuple[dict[str, int], dict[str, BlockLayout]]:
    """Bytes of the blocks in memory, and layouts of those on NVMe, by name."""
    on_nvme = {plan.name: plan.layout for plan in plans if plan.on_nvme}
    small = kept_in_ram({name: layout.nbytes for name, layout in on_nvme.items()})
    in_ram = {
        plan.name: plan.layout.nbytes
        for plan in plans
        if not plan.on_nvme or plan.name in small
    }
    return in_ram, {name: layout for name, layout in on_nvme.items() if name not in small}


def _furnish(
    unit: Unit, plans: Sequence[_BlockPlan], homes: Homes, settings: Settings,
    values: Values | None, spare: SparePages,
) -> None:
    """Its blocks, one after the other: each holds its values before a tensor shows it."""
    for plan in plans:
        home = homes.home(plan.name)
        block = Block(plan.name, plan.layout, plan.members, home, settings.device, spare)
        _fill(block, plan, values)
        unit.blocks.append(block)
        for managed in block.tensors:
            managed.take_home()


def _fill(block: Block, plan: _BlockPlan, values: Values | None) -> None:
    """The first values to the home."""
    whole = torch.zeros(block.nbytes, dtype=torch.uint8, device="cpu")
    storage = whole.untyped_storage()
    for source in plan.layout.sources:
        if source.storage is not None:
            begin = source.segment.offset_bytes
            whole[begin : begin + source.segment.nbytes].copy_(source.values())
    for managed in block.tensors:
        if managed.tensor.is_meta:
            managed.is_unset = values is None
            if values is not None:
                target = managed.place.in_block(storage, torch.device("cpu"))
                _set(target, managed.member.name, values)
    for request in block.home.write(0, whole):
        request.wait()


def _set(target: torch.Tensor, name: str, values: Values) -> None:
    """Fill a tensor of any stride and device, piece by piece where it can be."""
    in_place = target.device.type == "cpu" and target.is_contiguous()
    whole = target if in_place else torch.empty(target.shape, dtype=target.dtype, device="cpu")
    flat = whole.view(-1)
    for start in range(0, flat.numel(), _PIECE_NUMEL):
        values(name, start, flat[start : start + _PIECE_NUMEL])
    if not in_place:
        target.copy_(whole)


def _move(group: list[Member], device: torch.device, values: Values | None) -> None:
    """Tensors of one storage, to the device, where they share one again."""
    if all(member.tensor.device == device for member in group):
        return
    layout = lay_out([member.tensor for member in group], alignment_nbytes=TENSOR_ALIGNMENT_NBYTES)
    storage = torch.UntypedStorage(layout.nbytes, device=device)
    for source in layout.sources:
        if source.storage is not None:
            torch.empty(0, dtype=torch.uint8, device=device).set_(
                storage, source.segment.offset_bytes, (source.segment.nbytes,), (1,)
            ).copy_(source.values())
    for member, place in zip(group, layout.places, strict=True):
        on_device = place.in_block(storage, device)
        if member.tensor.is_meta:
            if values is None:
                raise SwapUsageError(
                    f"{member.name} is to live on the device, and has no values yet (meta device)",
                    fix="load the model first, or freeze it",
                )
            _set(on_device, member.name, values)
        give_data(member.tensor, on_device)


def _give_back(block: Block) -> None:
    # One that was converted by the user is in memory of its own.
    away = [each for each in block.tensors if not each.is_converted and not each.tensor.is_meta]
    if not away:
        return
    whole = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
    for request in block.home.read(0, whole):
        try:
            request.wait()
        except SwapChecksumError as error:
            raise altered(block, error) from error
    storages: dict[object, torch.UntypedStorage] = {}
    for managed in away:
        segment = managed.place.segment
        device = managed.first_device
        if segment not in storages:
            begin = segment.offset_bytes
            values = whole[begin : begin + segment.nbytes]
            storages[segment] = values.to(device, copy=True).untyped_storage()
        managed.tensor.data = managed.place.in_segment(storages[segment])
        if managed.tensor.grad is not None and managed.tensor.grad.device != device:
            managed.tensor.grad = managed.tensor.grad.to(device)


def _needs(cuts: Sequence[UnitCut], units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    by_module: dict[nn.Module, dict[Unit, None]] = {}
    for cut, unit in zip(cuts, units, strict=True):
        for member in cut.members:
            for module, _ in member.places:
                by_module.setdefault(module, {})[unit] = None
    needs = {module: list(found) for module, found in by_module.items()}
    for cut in cuts:
        if cut.is_whole:
            inside = [unit for module in cut.owner.modules() for unit in by_module.get(module, ())]
            needs[cut.owner] = list(dict.fromkeys(inside))
    return needs
