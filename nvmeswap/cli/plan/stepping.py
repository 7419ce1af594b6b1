"""The optimizer's step, in time: sub-groups that the walk does not find in memory are read ahead
into free slots, updated one after the other, and written behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.swap.sub_group import MasterForm, SubGroupLayout
from nvmeswap.zero3.foresight import Footprint


@dataclass(frozen=True, slots=True)
class Stepping:
    """One optimizer step. `drive_s` is what moving its bytes takes alone, `update_s` and `digest_s`
    what the processor does; `step_s` has also what can't overlap at the walk's ends."""

    read_nbytes: int
    write_nbytes: int
    drive_s: float
    update_s: float
    digest_s: float
    step_s: float

    @property
    def host_s(self) -> float:
        return self.update_s + self.digest_s


@dataclass(frozen=True, slots=True)
class _Visit:
    """One sub-group in the order of the walk. `has_slot`: it stays in memory for good."""

    numel: int
    read_nbytes: int
    write_nbytes: int
    has_slot: bool


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
    slots = sum(each.count for each in footprint.pools["optimizer state"].classes)
    slots -= len(footprint.layouts) - len(footprint.swapped)
    visits = list(_visits(footprint, slots, cached))
    read_nbytes = sum(visit.read_nbytes for visit in visits)
    write_nbytes = sum(visit.write_nbytes for visit in visits)
    drive_s = drives.move_s(read_nbytes + ahead_nbytes, write_nbytes)
    walk = _Walk(
        drives, host, checksums=checksums,
        slowdown=_slowdown(drives, read_nbytes + ahead_nbytes, write_nbytes),
        drive_free_s=ahead_nbytes / drives.read_nbytes_per_s,
    )
    return Stepping(
        read_nbytes=read_nbytes,
        write_nbytes=write_nbytes,
        drive_s=drive_s,
        update_s=footprint.trained_numel / host.update_numel_per_s,
        digest_s=(read_nbytes + write_nbytes) / host.digest_nbytes_per_s if checksums else 0.0,
        step_s=walk.run(visits, slots),
    )


def _slowdown(drives: DriveRates, read_nbytes: float, write_nbytes: float) -> float:
    """What a byte takes in company, over what it takes alone."""
    alone_s = read_nbytes / drives.read_nbytes_per_s + write_nbytes / drives.write_nbytes_per_s
    return drives.move_s(read_nbytes, write_nbytes) / alone_s if alone_s else 1.0


def _visits(footprint: Footprint, slots: int, cached: frozenset[str]) -> Iterator[_Visit]:
    on_nvme = _on_nvme(footprint)
    swapped = {layout.key for layout in footprint.swapped}
    found = 0  # the walk turns round: it begins with what the last step left in the slots
    for layout in footprint.layouts:
        values_nbytes = sum(
            segment.numel * on_nvme[segment.key].dtype.itemsize
            for segment in layout.segments
            if segment.key in on_nvme
        )
        numel = sum(segment.numel for segment in layout.segments)
        if layout.key not in swapped:
            yield _Visit(numel, 0, values_nbytes, has_slot=True)
            continue
        is_found = found < slots
        found += is_found
        read_nbytes = 0 if is_found else (
            layout.state_nbytes + _halves_nbytes(layout, on_nvme, cached)
        )
        yield _Visit(numel, read_nbytes, layout.state_nbytes + values_nbytes, has_slot=False)


class _Walk:
    """A drive that moves one thing after the other, and a thread that updates."""

    def __init__(
        self, drives: DriveRates, host: HostRates, *, checksums: bool, slowdown: float,
        drive_free_s: float,
    ) -> None:
        self._host = host
        self._digest_s_per_byte = 1 / host.digest_nbytes_per_s if checksums else 0.0
        self._read_s_per_byte = slowdown / drives.read_nbytes_per_s
        self._write_s_per_byte = slowdown / drives.write_nbytes_per_s
        self._drive_free_s = drive_free_s
        self._now_s = 0.0
        self._free_from_s: deque[float] = deque()  # slots, by when they can be read into

    def run(self, visits: list[_Visit], slots: int) -> float:
        """Seconds until the last byte is written."""
        unread = deque(index for index, visit in enumerate(visits) if visit.read_nbytes)
        found = sum(not visit.has_slot and not visit.read_nbytes for visit in visits)
        self._free_from_s.extend([0.0] * max(0, slots - found))
        ready_s: dict[int, float] = {}
        for index, visit in enumerate(visits):
            while unread and self._free_from_s and (
                self._free_from_s[0] <= self._now_s or unread[0] == index
            ):
                ready_s[unread[0]] = self._read(visits[unread[0]])
                unread.popleft()
            self._now_s = max(self._now_s, ready_s.get(index, 0.0))
            self._now_s += visit.read_nbytes * self._digest_s_per_byte
            self._now_s += visit.numel / self._host.update_numel_per_s
            self._write(visit)
        return max(self._now_s, self._drive_free_s)

    def _read(self, visit: _Visit) -> float:
        begin_s = max(self._free_from_s.popleft(), self._drive_free_s)
        self._drive_free_s = begin_s + visit.read_nbytes * self._read_s_per_byte
        return self._drive_free_s

    def _write(self, visit: _Visit) -> None:
        begin_s = max(self._now_s, self._drive_free_s)
        self._drive_free_s = begin_s + visit.write_nbytes * self._write_s_per_byte
        if not visit.has_slot:
            self._free_from_s.append(self._drive_free_s)
        self._now_s += visit.write_nbytes * self._digest_s_per_byte


def _halves_nbytes(
    layout: SubGroupLayout, on_nvme: Mapping[str, ShardSpec], cached: frozenset[str]
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


def _on_nvme(footprint: Footprint) -> dict[str, ShardSpec]:
    """Parameter shards whose home is there."""
    if not footprint.swaps_params:
        return {}
    return {
        spec.key: spec
        for group in footprint.groups
        for spec in group.specs
        if footprint.placement.swaps(spec)
    }
