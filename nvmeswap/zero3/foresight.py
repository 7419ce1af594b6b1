"""What `shard()` would take, without doing it: a model without memory is sharded over ranks that
are not there, and everything is sized by the functions that `shard()` itself uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from nvmeswap.config import Config, OffloadDevice
from nvmeswap.errors import SwapUsageError
from nvmeswap.memory.pool import SlotClass
from nvmeswap.store.extents import ExtentAllocator
from nvmeswap.store.swapfile import GROWTH_NBYTES
from nvmeswap.swap.optimizer import in_ram_count, stays_in_ram
from nvmeswap.swap.param_placement import ParamPlacement
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.space import PoolRequest, shrink
from nvmeswap.swap.sub_group import SubGroupLayout
from nvmeswap.zero3 import ahead, fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.build import param_placement, pool_requests
from nvmeswap.zero3.entries import Entry, entries_of
from nvmeswap.zero3.home import ShardedHome
from nvmeswap.zero3.optimizer import ShardedOptimizer
from nvmeswap.zero3.placement import keep_resident
from nvmeswap.zero3.wrap import optimizer_of, precision_of


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that FSDP2 gathers together: the specs of the swapped shards in order, elements of
    all parameters on all ranks, bytes of one gathered copy. `is_root`: it stays gathered from
    forward to backward."""

    specs: tuple[ShardSpec, ...]
    numel: int
    gathered_nbytes: int
    is_root: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of rank 0, which has the most, and how they are cut.

    `groups` in the order of their use in forward. `pools`: the slots as the budget left them, by
    name; `smallest_nbytes`, the least arena that works. `kept_nbytes`: shards too small for NVMe;
    `gradient_nbytes`: gradients in host memory, inside the arena or not (`gradients_in_arena`).
    `swapped`: the sub-groups that are read and written each step. `device_nbytes`: shards that stay
    on the device; `ahead_nbytes`: copies of others that one rank makes there ahead of their use.
    """

    groups: tuple[Group, ...]
    layouts: tuple[SubGroupLayout, ...]
    swapped: tuple[SubGroupLayout, ...]
    placement: ParamPlacement
    pools: Mapping[str, PoolRequest]
    smallest_nbytes: int
    swaps_params: bool
    numel: int
    trained_numel: int
    kept_nbytes: int
    gradient_nbytes: int
    gradients_in_arena: bool
    device_nbytes: int
    ahead_nbytes: int
    params_file_nbytes: int
    optimizer_file_nbytes: int

    @property
    def arena_nbytes(self) -> int:
        return sum(request.nbytes for request in self.pools.values())

    @property
    def host_nbytes(self) -> int:
        """Of the arena and what lies beside it."""
        beside = 0 if self.gradients_in_arena else self.gradient_nbytes
        return self.arena_nbytes + self.kept_nbytes + beside

    @property
    def device_peak_nbytes(self) -> int:
        """The root gathered, and two more groups (one is used while the next comes) or one and what
        is copied ahead; the gradient of one; and what stays there. Activations come on top."""
        root_nbytes = sum(group.gathered_nbytes for group in self.groups if group.is_root)
        sizes = [group.gathered_nbytes for group in self.groups if not group.is_root]
        count = 1 if self.ahead_nbytes else 2
        runs = [sum(sizes[first : first + count]) for first in range(len(sizes))]
        gathered_nbytes = root_nbytes + max(runs, default=0) + self.ahead_nbytes
        return self.device_nbytes + gathered_nbytes + max([root_nbytes, *sizes])

    def param_slots(self) -> Sequence[SlotClass]:
        """Slots for parameter shards, smallest first."""
        return self.pools["parameters"].classes


class Foresight:
    """A model as it would be sharded; `footprint` sizes it for one configuration after the other.

        foresight = Foresight(model, settings, ranks=8, device="cuda")
        foresight.footprint(settings).arena_nbytes

    Args: `model`, on the meta device (it is sharded in place, so it is of no other use afterwards);
    `device`, the kind that it will compute on, which need not be here.
    Raises: SwapUsageError for what `shard()` would refuse, and in a process that has a process
    group. Blocking: no I/O. Threads: one, since torch has one default process group a process.
    """

    def __init__(self, model: nn.Module, settings: Config, *, ranks: int, device: str) -> None:
        self._device = torch.device(device)
        with _pretended_ranks(ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            zero = settings.zero_optimization
            fsdp.shard_by_blocks(
                model, mesh, precision_of(settings), keeps_gathered=zero.stage < 3
            )
            swaps = zero.offload_param.device is not OffloadDevice.NONE
            self._entries = entries_of(model, swapped=swaps)
            keep_resident(self._entries, settings.nvmeswap, self._device)
            self._groups = tuple(_groups_of(model, self._entries))
            copies_ahead = ranks == 1 and self._device.type == "cuda"
            self._ahead_nbytes = _ahead_nbytes(self._groups) if copies_ahead else 0
            self._optimizer = self._over(model, settings)

    def _over(self, model: nn.Module, settings: Config) -> ShardedOptimizer:
        trained = [entry for entry in self._entries if entry.parameter.requires_grad]
        if not trained:
            raise SwapUsageError(
                "the model has no parameter to train",
                fix="set requires_grad_(True) on what is to be trained",
            )
        # Where a shard that stays is updated in place.
        if self._device.type in ("cpu", settings.nvmeswap.update_device):
            with FakeTensorMode():
                for entry in self._entries:
                    entry.local = torch.empty(entry.shape, dtype=entry.parameter.dtype)
        home = ShardedHome(model, self._entries, Agreement(None, torch.device("cpu")))
        cls, options = optimizer_of(settings.optimizer, None)
        parameters = [entry.parameter for entry in trained]
        made: ShardedOptimizer = ShardedOptimizer.over(cls, parameters, home, **options)
        return made

    def footprint(self, settings: Config, *, alignment_nbytes: int = 4096) -> Footprint:
        """Under these settings, which differ from the constructor's in counts and budgets at most.
        A budget that is too small shows as `arena_nbytes` above it."""
        zero, entries = settings.zero_optimization, self._entries
        placement = param_placement(settings, [entry for entry in entries if entry.swapped])
        layouts = self._optimizer.lay_out(zero.sub_group_size)
        wanted = pool_requests(settings, entries, layouts, self._device)
        pools = shrink(wanted, settings.nvmeswap.host_memory_nbytes)
        offload = zero.offload_optimizer
        kept = len(layouts)
        if offload.device is OffloadDevice.NVME:
            slots = sum(each.count for each in pools["optimizer state"].classes)
            kept = in_ram_count(
                layouts, offload.ratio, slot_count=slots, buffer_count=offload.buffer_count
            )
        swapped = tuple(
            layout
            for index, layout in enumerate(layouts)
            if not stays_in_ram(index, len(layouts), kept)
        )
        specs = [entry.spec for entry in entries if entry.swapped]
        on_nvme = [spec for spec in specs if placement.swaps(spec)]
        trained = [entry for entry in entries if entry.parameter.requires_grad]
        return Footprint(
            groups=self._groups,
            layouts=tuple(layouts),
            swapped=swapped,
            placement=placement,
            pools=pools,
            smallest_nbytes=sum(request.smallest.nbytes for request in wanted.values()),
            swaps_params=bool(specs),
            numel=sum(entry.numel for entry in entries),
            trained_numel=sum(entry.numel for entry in trained),
            kept_nbytes=sum(
                spec.nbytes for spec in specs if placement.on_nvme and not placement.swaps(spec)
            ),
            gradient_nbytes=sum(e.numel * e.parameter.dtype.itemsize for e in trained),
            gradients_in_arena=self._device.type != "cpu",
            device_nbytes=sum(e.numel * e.store_dtype.itemsize for e in entries if not e.swapped),
            ahead_nbytes=self._ahead_nbytes,
            params_file_nbytes=_file_nbytes([spec.nbytes for spec in on_nvme], alignment_nbytes),
            optimizer_file_nbytes=_file_nbytes(
                [layout.state_nbytes for layout in swapped], alignment_nbytes
            )
            + (GROWTH_NBYTES if swapped else 0),
        )


def _ahead_nbytes(groups: Sequence[Group]) -> int:
    swapped_nbytes = sum(spec.nbytes for group in groups for spec in group.specs)
    return min(swapped_nbytes, ahead.budget_nbytes(group.specs for group in groups))


def _file_nbytes(sizes: Sequence[int], alignment_nbytes: int) -> int:
    extents = ExtentAllocator(alignment_nbytes)
    for nbytes in sizes:
        extents.allocate(nbytes)
    return extents.end_bytes


def _groups_of(model: nn.Module, entries: Sequence[Entry]) -> Iterator[Group]:
    """The root's first, as forward uses them."""
    by_record = {id(entry.record): entry for entry in entries}
    for module in fsdp.fsdp_modules(model):
        members = [by_record[id(record)] for record in fsdp.params_of(module)]
        if members:
            shapes = [(member, member.parameter.shape.numel()) for member in members]
            yield Group(
                specs=tuple(member.spec for member in members if member.swapped),
                numel=sum(numel for _, numel in shapes),
                gathered_nbytes=sum(m.compute_dtype.itemsize * numel for m, numel in shapes),
                is_root=module is model,
            )


@contextlib.contextmanager
def _pretended_ranks(count: int) -> Iterator[None]:
    """This process as rank 0 of so many, whose collectives do nothing."""
    if dist.is_initialized():
        raise SwapUsageError(
            "this process has a process group already, and a plan needs one of its own",
            fix="plan in another process, or before init_process_group",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
