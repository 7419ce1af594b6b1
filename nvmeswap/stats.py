"""Frozen snapshots of counters, units in their names. Each is returned by some object's
`stats()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneLatency:
    """How long the requests of one lane took, from submission to the end, waiting behind others
    included. Percentiles are the upper ends of buckets an eighth of a power of two wide; 0 without
    requests."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine since it was opened. Byte counts are bytes moved by the kernel, padding
    included; `request_count` is calls, however many pieces each had; `registered_nbytes` is memory
    pinned for it now; `queue_depth` is what the kernel granted. Between files and memory of a GPU
    `gpudirect_nbytes` were moved by cuFile, `device_bounced_nbytes` through the engine's own host
    memory. `lanes` is by lane name."""

    read_direct_nbytes: int
    read_buffered_nbytes: int
    write_direct_nbytes: int
    write_buffered_nbytes: int
    bounced_nbytes: int
    request_count: int
    block_count: int
    retry_count: int
    error_count: int
    in_flight_count: int
    registered_nbytes: int
    queue_depth: int
    gpudirect_nbytes: int
    device_bounced_nbytes: int
    lanes: Mapping[str, LaneLatency]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Slots of one pool: `free_count + in_use_count == slot_count` always."""

    slot_count: int
    free_count: int
    in_use_count: int
    slot_nbytes: int
    wait_count: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """One rank's folder. `allocated_nbytes` is the size of its .swp files; `reserved_nbytes` of
    them were filled with zeros beforehand, which took `reserve_s`."""

    allocated_nbytes: int
    read_nbytes: int
    write_nbytes: int
    verified_nbytes: int
    reserved_nbytes: int
    reserve_s: float


@dataclass(frozen=True, slots=True)
class ParamStats:
    """Parameter shards. A hit is a fetch whose bytes were in RAM already, prefetched ones
    included; `held_slot_count` is of slots that shards hold now, read or being read into."""

    nvme_nbytes: int
    ram_nbytes: int
    cached_nbytes: int
    held_slot_count: int
    fetch_count: int
    hit_count: int
    prefetch_count: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """Optimizer steps. `step_s` is the time they took, also behind backward, but for waiting for
    gradients; of it `stall_s` was spent waiting for the disk, `update_s` computing. `hit_count`
    counts sub-groups found in RAM, `in_ram_count` of them stay there; `read_nbytes` and
    `write_nbytes` of state went from and to NVMe. The parameters' values are in neither: not the
    new ones that are written, nor the halves of split masters that are read."""

    sub_group_count: int
    in_ram_count: int
    step_count: int
    hit_count: int
    read_nbytes: int
    write_nbytes: int
    step_s: float
    stall_s: float
    update_s: float
    gradient_nbytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of one rank that one tier is the home of. States: masters, or what of them the
    parameters lack, and moments."""

    parameter_nbytes: int
    state_nbytes: int
    gradient_nbytes: int


@dataclass(frozen=True, slots=True)
class PlacementStats:
    """Where the bytes of one rank are at home: the training device, host memory, NVMe. Copies on
    their way, and those that `max_in_cpu` keeps, are in none of them."""

    device: TierStats
    host: TierStats
    nvme: TierStats


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Module offload. Resident: units on the device now, and at most at a time, without trained
    parameters and buffers that always are. `in_nbytes` were copied to the device, `out_nbytes` back
    (gradients, buffers, edits). Of `bring_count` copies of units to the device `prefetch_count`
    were started before their use, and `late_count` by it, from host memory too; uses waited
    `stall_s` in all. `host_nbytes`: memory taken for homes, slots and gradients."""

    unit_count: int
    resident_nbytes: int
    peak_resident_nbytes: int
    resident_unit_count: int
    peak_resident_unit_count: int
    in_nbytes: int
    out_nbytes: int
    bring_count: int
    prefetch_count: int
    late_count: int
    stall_s: float
    host_nbytes: int
