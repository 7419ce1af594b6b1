"""The update of one segment by cache-sized pieces.

A piece is made whole, updated and taken apart again while it is in the cache: gradients of another
dtype are upcast, a split master is joined and split, and new parameter values are produced, piece
by piece. Pieces begin at multiples of 64 elements from the beginning of the shard, where torch's
kernels give the same bits as one call over the whole tensor (their vector loops and remainder loops
round differently).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, Segment

PIECE_NUMEL = 1 << 17  # 512 KiB of fp32 for each of four tensors: fits a core's second-level cache


# Where a piece begins, its master, and what to call once that is new.
_Piece = tuple[int, torch.Tensor, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One parameter's turn in a step. `gradient` is flat, of any floating dtype and device,
    and is multiplied by `scale` first, if there is one. `scalars`: its step count and the like from
    before the step, None if it was never updated. `options`: those of its group. `edited`: its
    values, flat, if somebody else wrote to it since the last step."""

    gradient: torch.Tensor
    scale: torch.Tensor | None
    scalars: Mapping[str, Any] | None
    options: Mapping[str, Any]
    edited: torch.Tensor | None


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


def update_segment(
    rule: ElementwiseOptimizer,
    segment: Segment,
    memory: torch.Tensor,
    in_place: torch.Tensor | None,
    turn: Turn,
    scratch: Scratch,
    breathe: Callable[[], None],
) -> dict[str, Any]:
    """Update a segment whose sub-group lies in `memory`; returns the parameter's scalars after it.
    `breathe` is called after each piece.

    `in_place`: the whole parameter's own memory, flat, where new values are to be made right there;
    else they are left in the segment's output, or in its master if that has the right dtype.
    """
    scalars: dict[str, Any] = {}
    states = {name: segment.state(memory, name) for name in segment.item.states}
    gradient = turn.gradient[segment.start : segment.stop]
    for begin, master, leave in _masters(segment, memory, in_place, turn, scratch):
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
    in_place: torch.Tensor | None,
    turn: Turn,
    scratch: Scratch,
) -> Iterator[_Piece]:
    """The fp32 masters piece by piece."""
    form = segment.item.master
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
