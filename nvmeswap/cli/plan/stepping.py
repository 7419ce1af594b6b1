"""The optimizer's step: bytes of the sub-groups that the walk does not find in memory, and the
longer of moving them and updating."""

from __future__ import annotations

from dataclasses import dataclass

from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.swap.sub_group import MasterForm, SubGroupLayout
from nvmeswap.zero3.foresight import Footprint


@dataclass(frozen=True, slots=True)
class Stepping:
    """One optimizer step. `drive_s` and `host_s` run side by side; `edge_s` is what is left over
    when the walk ends: the last write."""

    read_nbytes: int
    write_nbytes: int
    drive_s: float
    update_s: float
    digest_s: float
    edge_s: float

    @property
    def host_s(self) -> float:
        return self.update_s + self.digest_s

    @property
    def step_s(self) -> float:
        return max(self.drive_s, self.host_s) + self.edge_s


def step(
    footprint: Footprint,
    drives: DriveRates,
    host: HostRates,
    *,
    checksums: bool,
    cached: frozenset[str] = frozenset(),
    ahead_nbytes: float = 0.0,
) -> Stepping:
    """`cached`: parameter shards in memory when it begins; `ahead_nbytes`: what the drive is still
    reading for the next forward."""
    swapped = footprint.swapped
    slots = sum(each.count for each in footprint.pools["optimizer state"].classes)
    # The walk turns round: it begins with what the last step left in the slots.
    found = min(len(swapped), max(0, slots - (len(footprint.layouts) - len(swapped))))
    missed = 1 - found / len(swapped) if swapped else 0.0
    on_nvme = _on_nvme(footprint)
    trained = {segment.key for layout in footprint.layouts for segment in layout.segments}
    state_nbytes = sum(layout.state_nbytes for layout in swapped)
    halves_nbytes = sum(_halves_nbytes(layout, on_nvme, cached) for layout in swapped)
    values_nbytes = sum(on_nvme[key] for key in trained & on_nvme.keys())
    read_nbytes = round(missed * (state_nbytes + halves_nbytes))
    write_nbytes = state_nbytes + values_nbytes
    last = max((layout.slot_nbytes for layout in swapped), default=0)
    summed = read_nbytes + write_nbytes if checksums else 0
    return Stepping(
        read_nbytes=read_nbytes,
        write_nbytes=write_nbytes,
        drive_s=drives.move_s(read_nbytes + ahead_nbytes, write_nbytes),
        update_s=footprint.trained_numel / host.update_numel_per_s,
        digest_s=summed / host.digest_nbytes_per_s,
        edge_s=min(last, write_nbytes) / drives.write_nbytes_per_s,
    )


def _halves_nbytes(
    layout: SubGroupLayout, on_nvme: dict[str, int], cached: frozenset[str]
) -> int:
    """Of parameters that are the upper halves of masters, and are not in memory."""
    return sum(
        segment.numel * segment.item.output_dtype.itemsize
        for segment in layout.segments
        if segment.item.master is MasterForm.SPLIT
        and segment.item.output_dtype is not None
        and segment.key in on_nvme
        and segment.key not in cached
    )


def _on_nvme(footprint: Footprint) -> dict[str, int]:
    """Bytes of each parameter shard whose home is there."""
    if not footprint.swaps_params:
        return {}
    return {
        spec.key: spec.nbytes
        for group in footprint.groups
        for spec in group.specs
        if footprint.placement.swaps(spec)
    }
