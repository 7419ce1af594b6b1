"""The update of a sub-group on a GPU, in a copy of its slot.

One copy brings the slot to its mirror on the device, one takes it back. In between whole segments
are updated there, and nothing else is written: neither the slot nor a parameter. So an update that
raises changes nothing, unless its class writes to the gradients that it is given. All is queued on
a stream of the updater's own, behind what the caller's current stream has queued, and `update`
returns when the last copy is over: it waits for that one event, and not for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nvmeswap.errors import SwapBudgetError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.swap.device_master import join_on_device, split_on_device
from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.sub_group import STATE_DTYPE, MasterForm, Segment, SubGroupLayout
from nvmeswap.swap.update import Turn, take_over_edits

_ALIGNMENT_NUMEL = 128  # of masters in their scratch: 512 bytes, as regions in a slot


@dataclass(frozen=True, slots=True)
class _NewValues:
    """What a parameter's own memory is to get, once all of a sub-group is updated."""

    place: torch.Tensor
    values: torch.Tensor


class MirroredUpdater:
    """`nvmeswap.swap.update.Updater` on `device`, which is that of the rule.

    It has there a mirror of the largest slot and an fp32 master of each element whose parameter is
    its master or half of it; what a segment needs beside it is taken from torch's allocator.
    """

    def __init__(self, rule: ElementwiseOptimizer, device: torch.device) -> None:
        self._rule = rule
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)
            self._done = torch.cuda.Event(blocking=True)  # a core is of more use elsewhere
        self._left_intact = False
        self.close()

    @property
    def left_intact(self) -> bool:
        return self._left_intact

    def close(self) -> None:
        self._mirror = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._masters = torch.empty(0, dtype=STATE_DTYPE, device=self._device)

    def reserve(self, layouts: Sequence[SubGroupLayout]) -> None:
        mirror_nbytes = max((layout.slot_nbytes for layout in layouts), default=0)
        masters_numel = max(map(_masters_numel, layouts), default=0)
        try:
            with self._on_own_stream():
                if mirror_nbytes > self._mirror.numel():
                    self._mirror = self._mirror.new_empty(mirror_nbytes)
                if masters_numel > self._masters.numel():
                    self._masters = self._masters.new_empty(masters_numel)
        except torch.OutOfMemoryError as error:
            wanted_nbytes = mirror_nbytes + masters_numel * STATE_DTYPE.itemsize
            raise SwapBudgetError(
                f"the copy of a sub-group does not fit into the memory of {self._device}",
                wanted_nbytes=wanted_nbytes,
                available_nbytes=torch.cuda.mem_get_info(self._device)[0],
                smallest_nbytes=wanted_nbytes,
                fix='lower sub_group_size, or use update_device="cpu"',
            ) from error

    def update(
        self,
        layout: SubGroupLayout,
        memory: torch.Tensor,
        turns: Sequence[tuple[Segment, Turn]],
        breathe: Callable[[], None],
    ) -> dict[str, dict[str, Any]]:
        self._left_intact = True
        self.reserve([layout])  # it may be one of a group that was added
        slot, mirror = memory[: layout.slot_nbytes], self._mirror[: layout.slot_nbytes]
        scalars: dict[str, dict[str, Any]] = {}
        new_values: list[_NewValues] = []
        begin = 0
        with self._behind_the_caller():
            mirror.copy_(slot, non_blocking=True)
            for segment, turn in turns:
                scratch = self._masters[begin : begin + segment.numel]
                begin += _scratch_numel(segment)
                scalars[segment.key] = self._update(segment, mirror, turn, scratch, new_values)
                breathe()
            self._left_intact = False
            for each in new_values:
                each.place.copy_(each.values, non_blocking=True)
            slot.copy_(mirror, non_blocking=True)
        return scalars

    def _update(
        self,
        segment: Segment,
        mirror: torch.Tensor,
        turn: Turn,
        scratch: torch.Tensor,
        new_values: list[_NewValues],
    ) -> dict[str, Any]:
        master = self._master(segment, mirror, turn, scratch)
        states = {name: segment.state(mirror, name) for name in segment.item.states}
        exact = {name: state.to(STATE_DTYPE) for name, state in states.items()}
        scalars = self._rule.update(
            master, self._gradient(segment, turn), exact, turn.scalars, turn.options
        )
        for name, state in states.items():
            if state is not exact[name]:
                state.copy_(exact[name])
        self._take_apart(segment, mirror, turn, master, new_values)
        return scalars

    def _gradient(self, segment: Segment, turn: Turn) -> torch.Tensor:
        gradient = turn.gradient[segment.start : segment.stop]
        gradient = gradient.to(self._device, non_blocking=True)
        if turn.scale is not None:
            gradient = gradient * turn.scale.to(self._device, gradient.dtype, non_blocking=True)
        return gradient.to(STATE_DTYPE)

    def _master(
        self, segment: Segment, mirror: torch.Tensor, turn: Turn, scratch: torch.Tensor
    ) -> torch.Tensor:
        """The exact values: in the mirror, or in `scratch`."""
        form = segment.item.master
        if form is MasterForm.WHOLE:
            master = segment.master(mirror)
            if turn.edited is not None:
                edited = turn.edited[segment.start : segment.stop]
                take_over_edits(master, edited.to(self._device))
            return master
        here = _own_memory(segment, turn)
        values = segment.output(mirror) if here is None else here
        assert values is not None
        if form is MasterForm.SPLIT and turn.edited is None:
            halves = values.to(self._device, non_blocking=True)
            join_on_device(halves, segment.rest_memory(mirror), scratch)
        else:
            scratch.copy_(values, non_blocking=True)
        return scratch

    def _take_apart(
        self,
        segment: Segment,
        mirror: torch.Tensor,
        turn: Turn,
        master: torch.Tensor,
        new_values: list[_NewValues],
    ) -> None:
        here, output = _own_memory(segment, turn), segment.output(mirror)
        values = master
        if segment.item.master is MasterForm.SPLIT:
            values = torch.empty_like(master, dtype=torch.bfloat16) if output is None else output
            split_on_device(master, values, segment.rest_memory(mirror))
        elif output is not None:
            output.copy_(master)
        if here is not None:
            new_values.append(_NewValues(here, values))

    @contextlib.contextmanager
    def _behind_the_caller(self) -> Iterator[None]:
        """Queue there what comes; at the end it is over, also if an error ends it: the slot may
        be given to another."""
        if not self._is_cuda:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_own_stream():
            try:
                yield
            finally:
                self._done.record(self._stream)
                self._done.synchronize()

    def _on_own_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._is_cuda else contextlib.nullcontext()


def _own_memory(segment: Segment, turn: Turn) -> torch.Tensor | None:
    """The segment of a parameter whose new values are to be made where it is."""
    return None if turn.in_place is None else turn.in_place[segment.start : segment.stop]


def _scratch_numel(segment: Segment) -> int:
    if segment.item.master is MasterForm.WHOLE:
        return 0
    return padded_nbytes(segment.numel, _ALIGNMENT_NUMEL)


def _masters_numel(layout: SubGroupLayout) -> int:
    return sum(map(_scratch_numel, layout.segments))
