"""How optimizer state is cut into sub-groups, and where each piece of it lies. Pure arithmetic.

A sub-group is a run of segments; a segment is a piece of one shard. Each fp32 state of a segment
(master, exp_avg, exp_avg_sq) is one region of the sub-group's extent, side by side, so that one
read and one write move it. Behind the extent the slot has room for the new parameter values in the
shard's own dtype, which are computed there and written to the parameter file from there:

    |<------------------- extent (fp32) ------------------->|<- outputs (bf16) ->|
    | master 0 | exp_avg 0 | exp_avg_sq 0 | master 1 | ...  | shard 0 | shard 1  |

Worked example: shards of 10_000 and 300 elements and sub-groups of at most 8_192 elements give
sub-group 0 = shard 0 [0, 8192) and sub-group 1 = shard 0 [8192, 10000), shard 1 [0, 300).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nvmeswap.io.alignment import padded_nbytes

STATE_DTYPE = torch.float32
# The state that is the exact value of the parameter; a shard that is its own master has none.
MASTER = "master"
# A shard is cut at multiples of this: 8 KiB of bf16, so that a piece of a shard begins at an
# aligned place of its file; and a multiple of 16, from where torch's fused kernels give the same
# bits as one call over the whole tensor.
SEGMENT_GRAIN_NUMEL = 4096
# Regions begin at multiples of this in memory: direct I/O from there needs no bounce.
_REGION_ALIGNMENT_NBYTES = 512


@dataclass(frozen=True, slots=True)
class StateItem:
    """A shard as the optimizer sees it: which fp32 states it has and what dtype its values have.

    `output_dtype` is None when the new values are not produced beside the master: the master is the
    parameter itself, or has its dtype.
    """

    key: str
    numel: int
    states: tuple[str, ...]
    output_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a shard, and the byte offsets of its regions in the slot."""

    key: str
    start: int
    stop: int
    offsets_bytes: dict[str, int]
    output_dtype: torch.dtype | None
    output_offset_bytes: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def state(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """The fp32 state called `name` in a slot's memory, flat [numel]."""
        begin = self.offsets_bytes[name]
        return memory[begin : begin + self.numel * STATE_DTYPE.itemsize].view(STATE_DTYPE)

    def output(self, memory: torch.Tensor) -> torch.Tensor | None:
        """The place for the new parameter values in a slot's memory, flat [numel], or None."""
        if self.output_dtype is None:
            return None
        begin = self.output_offset_bytes
        nbytes = self.numel * self.output_dtype.itemsize
        return memory[begin : begin + nbytes].view(self.output_dtype)


@dataclass(frozen=True, slots=True)
class SubGroupLayout:
    """The segments of one sub-group, the bytes of its extent and of its slot."""

    key: str
    segments: tuple[Segment, ...]
    state_nbytes: int
    slot_nbytes: int

    @property
    def holds_masters(self) -> bool:
        """True if every new parameter value is computed in the slot, and none in place."""
        return all(MASTER in segment.offsets_bytes for segment in self.segments)


def cut_into_sub_groups(items: Iterable[StateItem], sub_group_numel: int) -> list[SubGroupLayout]:
    """Fill sub-groups of at most `sub_group_numel` elements in the order given.

    A shard is cut only at multiples of `SEGMENT_GRAIN_NUMEL`; a smaller `sub_group_numel` is raised
    to that. Empty shards are in no sub-group.
    """
    limit = max(sub_group_numel, SEGMENT_GRAIN_NUMEL)
    groups: list[list[tuple[StateItem, int, int]]] = [[]]
    room = limit
    for item in items:
        start = 0
        while start < item.numel:
            left = item.numel - start
            take = left if left <= room else room // SEGMENT_GRAIN_NUMEL * SEGMENT_GRAIN_NUMEL
            if take == 0:
                groups.append([])
                room = limit
                continue
            groups[-1].append((item, start, start + take))
            start, room = start + take, room - take
    return [_lay_out(f"sub_group.{i}", group) for i, group in enumerate(filter(None, groups))]


def _lay_out(key: str, pieces: Sequence[tuple[StateItem, int, int]]) -> SubGroupLayout:
    """Regions first, then outputs, each on its alignment."""
    end = 0
    regions: list[dict[str, int]] = []
    for item, start, stop in pieces:
        offsets: dict[str, int] = {}
        for name in item.states:
            offsets[name] = end
            end += padded_nbytes((stop - start) * STATE_DTYPE.itemsize, _REGION_ALIGNMENT_NBYTES)
        regions.append(offsets)
    state_nbytes = end
    segments = []
    for (item, start, stop), offsets in zip(pieces, regions, strict=True):
        segments.append(Segment(item.key, start, stop, offsets, item.output_dtype, end))
        if item.output_dtype is not None:
            nbytes = (stop - start) * item.output_dtype.itemsize
            end += padded_nbytes(nbytes, _REGION_ALIGNMENT_NBYTES)
    return SubGroupLayout(key, tuple(segments), state_nbytes, end)
