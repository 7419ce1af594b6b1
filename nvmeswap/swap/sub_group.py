"""How optimizer state is cut into sub-groups, and where each piece of it lies. Pure arithmetic.

A sub-group is a run of segments; a segment is a piece of one shard. Its extent holds what the
update keeps between steps: of each segment first the master, in one of three forms, then the
optimizer's own states (exp_avg, ...). One read and one write move it; the first step, which finds
no states yet, reads the masters alone. Behind the extent the slot has room for new parameter values
in the shard's own dtype, which are computed there and go to the parameter from there. Where they
are the upper halves of split masters, the old ones are read from the parameter to that place:

    |<------------------------ extent ------------------------->|<-- outputs (bf16) -->|
    | master 0 | master 1 |..| exp_avg 0 | exp_avg_sq 0 | ...   | shard 0 | shard 1    |

Worked example: shards of 10_000 and 300 elements and sub-groups of at most 8_192 elements give
sub-group 0 = shard 0 [0, 8192) and sub-group 1 = shard 0 [8192, 10000), shard 1 [0, 300).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.swap.master import MasterRest

STATE_DTYPE = torch.float32
# The name of the exact value of a parameter among its states.
MASTER = "master"
# A shard is cut at multiples of this: 8 KiB of bf16, so that a piece of a shard begins at an
# aligned place of its file; and a multiple of 16, from where torch's fused kernels give the same
# bits as one call over the whole tensor.
SEGMENT_GRAIN_NUMEL = 4096
# Regions begin at multiples of this in memory: direct I/O from there needs no bounce.
_REGION_ALIGNMENT_NBYTES = 512
_REGION_ALIGNMENT_NUMEL = _REGION_ALIGNMENT_NBYTES // STATE_DTYPE.itemsize
# Masters end at a multiple of this, so that they can be read alone from any drive we take.
_MASTERS_ALIGNMENT_NBYTES = 8192


class MasterForm(enum.Enum):
    """Where the exact fp32 value of a parameter is.

    IN_PLACE: the parameter is fp32 in memory and is updated there. WHOLE: beside the states,
    4 bytes an element. SPLIT: the parameter is its upper half (rounded to bf16), and the rest that
    makes it exact lies beside the states, 2.125 bytes an element.
    """

    IN_PLACE = "in place"
    WHOLE = "whole"
    SPLIT = "split"

    def nbytes(self, numel: int) -> int:
        """Of a segment of so many elements, in the extent."""
        if self is MasterForm.IN_PLACE:
            return 0
        return numel * STATE_DTYPE.itemsize if self is MasterForm.WHOLE else (
            MasterRest.nbytes_for(numel)
        )


@dataclass(frozen=True, slots=True)
class StateItem:
    """A shard as the optimizer sees it: the form of its master, its states and their dtype.

    `output_dtype` is the dtype of the new values where they are produced in the slot; None where
    the update is made in the parameter's own memory, or the master has the parameter's dtype.
    """

    key: str
    numel: int
    master: MasterForm
    states: tuple[str, ...]
    state_dtype: torch.dtype
    output_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a shard, and the byte offsets of its regions in the slot."""

    item: StateItem
    start: int
    stop: int
    master_offset_bytes: int
    state_offsets_bytes: dict[str, int]
    output_offset_bytes: int

    @property
    def key(self) -> str:
        return self.item.key

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def master(self, memory: torch.Tensor) -> torch.Tensor:
        """A WHOLE master in a slot's memory, fp32, flat [numel]."""
        assert self.item.master is MasterForm.WHOLE
        return self._region(memory, self.master_offset_bytes, STATE_DTYPE)

    def rest(self, memory: torch.Tensor) -> MasterRest:
        """What makes a SPLIT master exact, in a slot's memory on the host."""
        return MasterRest(self.rest_memory(memory), self.numel)

    def rest_memory(self, memory: torch.Tensor) -> torch.Tensor:
        """The bytes of `rest`; the slot's copy may be on a GPU."""
        assert self.item.master is MasterForm.SPLIT
        begin = self.master_offset_bytes
        return memory[begin : begin + MasterRest.nbytes_for(self.numel)]

    def state(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """The state called `name` in a slot's memory, `item.state_dtype`, flat [numel]."""
        return self._region(memory, self.state_offsets_bytes[name], self.item.state_dtype)

    def output(self, memory: torch.Tensor) -> torch.Tensor | None:
        """The place for the new parameter values in a slot's memory, flat [numel], or None."""
        if self.item.output_dtype is None:
            return None
        return self._region(memory, self.output_offset_bytes, self.item.output_dtype)

    def _region(self, memory: torch.Tensor, begin: int, dtype: torch.dtype) -> torch.Tensor:
        return memory[begin : begin + self.numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True, slots=True)
class SubGroupLayout:
    """The segments of one sub-group, and the bytes of its masters, its extent and its slot."""

    key: str
    segments: tuple[Segment, ...]
    masters_nbytes: int
    state_nbytes: int
    slot_nbytes: int


def cut_into_sub_groups(
    items: Iterable[StateItem], sub_group_numel: int, *, first_index: int = 0
) -> list[SubGroupLayout]:
    """Fill sub-groups of at most `sub_group_numel` elements in the order given; they are numbered
    from `first_index` on.

    A shard is cut only at multiples of `SEGMENT_GRAIN_NUMEL`; a smaller `sub_group_numel` is raised
    to that. A tiny segment counts as what its padding takes, so that bytes are bounded too. Empty
    shards are in no sub-group.
    """
    limit = max(sub_group_numel, SEGMENT_GRAIN_NUMEL)
    groups: list[list[tuple[StateItem, int, int]]] = [[]]
    room = limit
    for item in items:
        start = 0
        while start < item.numel:
            left = item.numel - start
            if padded_nbytes(left, _REGION_ALIGNMENT_NUMEL) <= room:
                take = left
            else:
                take = min(left, room) // SEGMENT_GRAIN_NUMEL * SEGMENT_GRAIN_NUMEL
            if take == 0:
                groups.append([])
                room = limit
                continue
            groups[-1].append((item, start, start + take))
            start, room = start + take, room - padded_nbytes(take, _REGION_ALIGNMENT_NUMEL)
    return [
        _lay_out(f"sub_group.{index}", group)
        for index, group in enumerate(filter(None, groups), first_index)
    ]


def _lay_out(key: str, pieces: Sequence[tuple[StateItem, int, int]]) -> SubGroupLayout:
    """Masters first, then states, then outputs, each on its alignment."""
    end = 0

    def place(nbytes: int) -> int:
        nonlocal end
        begin = end
        end += padded_nbytes(nbytes, _REGION_ALIGNMENT_NBYTES)
        return begin

    masters = [place(item.master.nbytes(stop - start)) for item, start, stop in pieces]
    end = masters_nbytes = padded_nbytes(end, _MASTERS_ALIGNMENT_NBYTES)
    states = [
        {name: place((stop - start) * item.state_dtype.itemsize) for name in item.states}
        for item, start, stop in pieces
    ]
    state_nbytes = end
    segments = []
    for (item, start, stop), master, offsets in zip(pieces, masters, states, strict=True):
        itemsize = 0 if item.output_dtype is None else item.output_dtype.itemsize
        output = place((stop - start) * itemsize)
        segments.append(Segment(item, start, stop, master, offsets, output))
    return SubGroupLayout(key, tuple(segments), masters_nbytes, state_nbytes, end)
