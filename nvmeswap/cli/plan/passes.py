"""Forward and backward, in time: which shard is read when, and who waits for whom.

A drive that reads one shard after the other, slots that are few, and a processor that uses the
shards in order: played through use by use with the rules of `PartitionedParamSwapper` (reads ahead
into free slots, `max_in_cpu`, who is needed last gives way) and its own `Plan`. The first step is
recorded, the second begins without what is read ahead at a step's end, the third is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.swap.plan import Plan
from nvmeswap.swap.shard import ShardSpec
from nvmeswap.zero3.foresight import Footprint, Group

_STEPS = 3
_MOST_SIMULATED = 2  # micro-batches: all after the first are alike


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one micro-batch in memory, gathering and gradients' way to the host included."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Passes:
    """Of one step, all micro-batches: seconds, of them `host_s` without waiting for the drive,
    and bytes read. `ahead_nbytes` are read while the optimizer steps; `cached`: shards in memory
    when it begins."""

    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float
    forward_read_nbytes: int
    backward_read_nbytes: int
    ahead_nbytes: float
    cached: frozenset[str]


@dataclass(slots=True)
class _Pass:
    """One forward or backward of a simulated step."""

    began_s: float
    taken_s: float = 0.0
    host_s: float = 0.0
    read_nbytes: int = 0


def play(
    footprint: Footprint,
    drives: DriveRates,
    host: HostRates,
    compute: Compute,
    *,
    micro_batches: int,
    checksums: bool,
) -> Passes:
    """What a step's passes take once the plan is known."""
    machine = _Machine(footprint, drives, host, checksums=checksums)
    simulated = min(micro_batches, _MOST_SIMULATED)
    for _ in range(_STEPS):
        done = [
            machine.run(_uses(footprint.groups, compute, is_forward=is_forward))
            for _ in range(simulated)
            for is_forward in (True, False)
        ]
        ahead_nbytes = max(0.0, machine.drive_free_s - machine.now_s) * drives.read_nbytes_per_s
        cached = frozenset(machine.ready_s)
        machine.end_step()
    weights = [1, micro_batches - 1][:simulated]
    forward, backward = (
        [(weight, done[2 * i + phase]) for i, weight in enumerate(weights)] for phase in (0, 1)
    )
    return Passes(
        forward_s=sum(weight * each.taken_s for weight, each in forward),
        backward_s=sum(weight * each.taken_s for weight, each in backward),
        forward_host_s=sum(weight * each.host_s for weight, each in forward),
        backward_host_s=sum(weight * each.host_s for weight, each in backward),
        forward_read_nbytes=sum(weight * each.read_nbytes for weight, each in forward),
        backward_read_nbytes=sum(weight * each.read_nbytes for weight, each in backward),
        ahead_nbytes=ahead_nbytes,
        cached=cached,
    )


def _uses(
    groups: Sequence[Group], compute: Compute, *, is_forward: bool
) -> Iterator[tuple[Group, float, bool]]:
    """Groups in order, each with its share of the computing, and whether it is gathered."""
    total_numel = sum(group.numel for group in groups) or 1
    total_s = compute.forward_s if is_forward else compute.backward_s
    for group in groups if is_forward else reversed(groups):
        yield group, total_s * group.numel / total_numel, is_forward or not group.is_root


@dataclass(slots=True)
class _Machine:
    """One rank's drive, slots and processor. `ready_s`: when each shard in a slot has arrived."""

    footprint: Footprint
    drives: DriveRates
    host: HostRates
    checksums: bool
    now_s: float = 0.0
    drive_free_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    _free: dict[int, int] = field(default_factory=dict)
    _plan: Plan = field(default_factory=Plan)
    _kept: dict[str, ShardSpec] = field(default_factory=dict)
    _specs: dict[str, ShardSpec] = field(default_factory=dict)
    _unsummed: set[str] = field(default_factory=set)
    _current: _Pass = field(default_factory=lambda: _Pass(0.0))

    def __post_init__(self) -> None:
        if self.footprint.placement.on_nvme:
            self._free = {each.nbytes: each.count for each in self.footprint.param_slots()}
        self._specs = {s.key: s for group in self.footprint.groups for s in group.specs}

    def run(self, uses: Iterator[tuple[Group, float, bool]]) -> _Pass:
        self._current = current = _Pass(self.now_s)
        for group, compute_s, is_gathered in uses:
            if is_gathered and self.footprint.swaps_params:
                for spec in group.specs:
                    self._use(spec)
            self._spend(compute_s)
        current.taken_s = self.now_s - current.began_s
        return current

    def end_step(self) -> None:
        """What is read ahead arrives while the optimizer steps."""
        self.now_s = max(self.now_s, self.drive_free_s)
        self.drive_free_s = self.now_s
        self._plan.end_step()

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds
        self._current.host_s += seconds

    def _use(self, spec: ShardSpec) -> None:
        placement = self.footprint.placement
        self._plan.use(spec.key)
        if placement.swaps(spec):
            if placement.streams(spec):
                self.now_s = self._read(spec)
            else:
                if spec.key not in self.ready_s:
                    self._take_slot(spec)
                    self.ready_s[spec.key] = self._read(spec)
                self.now_s = max(self.now_s, self.ready_s[spec.key])
            self._sum(spec)
            if not placement.streams(spec):
                self._keep(spec)
        self._read_ahead()

    def _sum(self, spec: ShardSpec) -> None:
        if self.checksums and spec.key in self._unsummed:
            self._unsummed.discard(spec.key)
            self._spend(spec.nbytes / self.host.digest_nbytes_per_s)

    def _read(self, spec: ShardSpec) -> float:
        """When it will have arrived."""
        seconds = spec.nbytes / self.drives.read_nbytes_per_s
        self.drive_free_s = max(self.now_s, self.drive_free_s) + seconds
        self._current.read_nbytes += spec.nbytes
        self._unsummed.add(spec.key)
        return self.drive_free_s

    def _slot_class(self, spec: ShardSpec) -> int:
        return min(nbytes for nbytes in self._free if nbytes >= spec.nbytes)

    def _take_slot(self, spec: ShardSpec) -> None:
        wanted = self._slot_class(spec)
        if not self._free[wanted]:
            held = [key for key in self.ready_s if self._slot_class(self._specs[key]) == wanted]
            self._evict(max(held, key=self._plan.next_use))
        self._free[wanted] -= 1

    def _evict(self, key: str) -> None:
        self._kept.pop(key, None)
        del self.ready_s[key]
        self._free[self._slot_class(self._specs[key])] += 1

    def _keep(self, spec: ShardSpec) -> None:
        self._kept[spec.key] = spec
        while sum(s.numel for s in self._kept.values()) > self.footprint.placement.max_in_cpu:
            self._evict(max(self._kept, key=self._plan.next_use))

    def _read_ahead(self) -> None:
        placement = self.footprint.placement
        if not any(self._free.values()):
            return
        count = sum(each.count for each in self.footprint.param_slots())
        for key in islice(self._plan.upcoming(), 2 * count):
            spec = self._specs[key]
            if not placement.swaps(spec) or placement.streams(spec) or key in self.ready_s:
                continue
            slot_class = self._slot_class(spec)
            if self._free[slot_class]:
                self._free[slot_class] -= 1
                self.ready_s[key] = self._read(spec)
