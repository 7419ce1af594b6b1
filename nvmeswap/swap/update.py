"""The update of one segment by cache-sized pieces.

A piece is made whole, updated and taken apart again while it is in the cache: gradients of another
dtype are upcast, a split master is joined and split, and new parameter values are produced, piece
by piece. Pieces begin at multiples of 64 elements from the beginning of the shard, where torch's
kernels give the same bits as one call over the whole tensor (their vector loops and remainder loops
round differently).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, Segment, SubGroupLayout

PIECE_NUMEL = 1 << 17  # 512 KiB of fp32 for each of four tensors: fits a core's second-level cache


# Where a piece begins, its master, and what to call once that is new.
_Piece = tuple[int, torch.Tensor, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One parameter's turn in a step. `gradient` is flat, of any floating dtype and device,
    and is multiplied by `scale` first, if there is one. `scalars`: its step count and the like from
    before the step, None if it was never updated. `options`: those of its group. `edited`: its
    values, flat, if somebody else wrote to it since the last step. `in_place`: the parameter's own
    memory, flat, where new values are to be made right there; else they are left in the segment's
    output, or in its master if that has the right dtype."""

    gradient: torch.Tensor
    scale: torch.Tensor | None
    scalars: Mapping[str, Any] | None
    options: Mapping[str, Any]
    edited: torch.Tensor | None
    in_place: torch.Tensor | None


class Updater(Protocol):
    """Updates sub-groups that are in memory, one at a time. Threads: the swapper's, but `reserve`
    and `close`."""

    def reserve(self, layouts: Sequence[SubGroupLayout]) -> None:
        """Take the memory that these need, so that no step is the first to find it missing. Raises
        SwapBudgetError."""

    def update(
        self,
        layout: SubGroupLayout,
        memory: torch.Tensor,
        turns: Sequence[tuple[Segment, Turn]],
        breathe: Callable[[], None],
    ) -> dict[str, dict[str, Any]]:
        """Update segments of a sub-group that lies in `memory`; returns their parameters' scalars
        after it, by key. On return all is there, on whatever device it is. `breathe` is called now
        and then."""

    @property
    def left_intact(self) -> bool:
        """After an `update` that raised: True if it changed nothing."""

    def close(self) -> None:
        """Give the memory back."""


class Scratch:
    """Memory for one piece, made when it is first needed and kept: so it stays in the cache."""

    def __init__(self) -> None:
        self._pieces: dict[str, torch.Tensor] = {}

    def piece(self, name: str, numel: int) -> torch.Tensor:
        """fp32, flat [numel], in host memory (page-locked beside a GPU), contents undefined."""
        if name not in self._pieces:
            on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            self._pieces[name] = torch.empty(
                PIECE_NUMEL, dtype=STATE_DTYPE, pin_memory=on_gpu, device="cpu"
            )
        return self._pieces[name][:numel]

    def upcast(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """`values` in fp32 on the host: themselves, or a copy."""
        if values.dtype is STATE_DTYPE and not values.is_cuda:
            return values
        return self.piece(name, values.numel()).copy_(values)


class CachedUpdater:
    """Piece by piece in the processor's cache, in host memory."""

    left_intact = False  # pieces are updated where they lie

    def __init__(self, rule: ElementwiseOptimizer) -> None:
        self._rule = rule
        self._scratch = Scratch()

    def reserve(self, layouts: Sequence[SubGroupLayout]) -> None: ...

    def update(
        self,
        layout: SubGroupLayout,
        memory: torch.Tensor,
        turns: Sequence[tuple[Segment, Turn]],
        breathe: Callable[[], None],
    ) -> dict[str, dict[str, Any]]:
        return {
            segment.key: _update(self._rule, segment, memory, turn, self._scratch, breathe)
            for segment, turn in turns
        }

    def close(self) -> None: ...


def _update(
    rule: ElementwiseOptimizer,
    segment: Segment,
    memory: torch.Tensor,
    turn: Turn,
    scratch: Scratch,
    breathe: Callable[[], None],
) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    states = {name: segment.state(memory, name) for name in segment.item.states}
    gradient = turn.gradient[segment.start : segment.stop]
    for begin, master, leave in _masters(segment, memory, turn, scratch):
        piece = slice(begin, begin + master.numel())
        scaled = gradient[piece]
        if turn.scale is not None:
            scaled = scaled * turn.scale.to(scaled.device, scaled.dtype)
        exact = {name: scratch.upcast(name, state[piece]) for name, state in states.items()}
        scalars = rule.update(
            master, scratch.upcast("gradient", scaled), exact, turn.scalars, turn.options
        )
        if segment.item.state_dtype is not STATE_DTYPE:
            for name, state in states.items():
                state[piece].copy_(exact[name])
        leave()
        breathe()
    return scalars


def _masters(
    segment: Segment,
    memory: torch.Tensor,
    turn: Turn,
    scratch: Scratch,
) -> Iterator[_Piece]:
    """The fp32 masters piece by piece."""
    form, in_place = segment.item.master, turn.in_place
    output = segment.output(memory)
    here = None if in_place is None else in_place[segment.start : segment.stop]
    if form is MasterForm.SPLIT:
        halves = output if here is None else here
        assert halves is not None
        yield from _joined(segment, memory, halves, turn, scratch)
        return
    if form is MasterForm.IN_PLACE:
        assert here is not None
        whole = here
    else:
        whole = segment.master(memory)
        if turn.edited is not None:
            take_over_edits(whole, turn.edited[segment.start : segment.stop])
    for begin in range(0, segment.numel, PIECE_NUMEL):
        piece = slice(begin, begin + PIECE_NUMEL)
        master = whole[piece]
        yield begin, master, _copy_to(None if output is None else output[piece], master)


def _copy_to(output: torch.Tensor | None, master: torch.Tensor) -> Callable[[], object]:
    if output is None:
        return lambda: None
    return lambda: output.copy_(master)


def _joined(
    segment: Segment,
    memory: torch.Tensor,
    halves: torch.Tensor,
    turn: Turn,
    scratch: Scratch,
) -> Iterator[_Piece]:
    rest = segment.rest(memory)
    if turn.edited is not None:
        rest.clear()  # the parameter's value is all that counts
    for begin in range(0, segment.numel, PIECE_NUMEL):
        half = halves[begin : begin + PIECE_NUMEL]
        master = scratch.piece("master", half.numel())
        rest.join(begin, half, master)

        yield begin, master, partial(rest.split, begin, master, half)
    halves[:0].zero_()  # what was written by address: autograd's saved tensors must see it


def take_over_edits(master: torch.Tensor, values: torch.Tensor) -> None:
    """Where the parameter is not its master rounded, somebody wrote to it: that is its value."""
    bits = torch.int16 if values.dtype.itemsize == 2 else torch.int32  # tell -0.0 from 0.0
    changed = values.view(bits) != master.to(values.dtype).view(bits)
    master[changed] = values[changed].to(master.dtype)
