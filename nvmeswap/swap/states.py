"""States of single parameters, read and written outside a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.io.engine import Lane
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.home import ParameterHome
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.shard import Submit
from nvmeswap.swap.sub_group import MASTER, STATE_DTYPE, MasterForm, Segment, SubGroupLayout
from nvmeswap.swap.traffic import SubGroup
from nvmeswap.swap.update import take_over_edits


@dataclass(frozen=True, slots=True)
class Source:
    """A state to be loaded: `read(start, stop)` gives those elements, flat, any dtype and
    device."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, values: Tensor) -> Source:
        """From a tensor of any shape."""
        flat = values.detach().reshape(-1)
        return cls(tuple(values.shape), lambda start, stop: flat[start:stop])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def whole(self) -> Tensor:
        """A copy of all of it."""
        return self.read(0, self.numel).reshape(self.shape).clone()


def halves_to_read(
    home: ParameterHome,
    by_key: Mapping[str, Tensor],
    layout: SubGroupLayout,
    memory: Tensor,
    lane: Lane,
) -> list[Submit]:
    """What brings the upper halves of split masters, which are the parameters, to a sub-group's
    slot."""
    return [
        partial(home.fetch, by_key[segment.key], segment.start, half, lane)
        for segment in layout.segments
        if segment.item.master is MasterForm.SPLIT
        and (half := segment.output(memory)) is not None
    ]


class OptimizerStates:
    """Masters and states by key and name, whatever form and place they have; flat tensors.

    Blocking: all but `publish_with` wait for the disk. Threads: the training loop's; what is
    called by a visit, on the swapper's.
    """

    def __init__(
        self,
        swapper: PipelinedOptimizerSwapper,
        home: ParameterHome,
        by_key: Mapping[str, Tensor],
    ) -> None:
        self._swapper = swapper
        self._home = home
        self._by_key = by_key

    # --- for visits ---------------------------------------------------------------------------

    def fill_in_masters(self, group: SubGroup) -> bool:
        """A visit: the first masters, as the parameters are. (A split one that is its parameter has
        a rest of zeros, which is what the memory holds.)"""
        changes = [self._fill_in_master(group, segment) for segment in group.layout.segments]
        return any(changes)

    def _fill_in_master(self, group: SubGroup, segment: Segment) -> bool:
        """True if that is to be written to the extent."""
        form, half = segment.item.master, segment.output(group.memory)
        if form is MasterForm.IN_PLACE or (form is MasterForm.SPLIT and half is None):
            return False
        values = self._home.initial_values(self._by_key[segment.key])
        assert values is not None
        piece = values[segment.start : segment.stop]
        if form is MasterForm.WHOLE:
            segment.master(group.memory).copy_(piece)
            return True
        assert half is not None
        if piece.dtype is half.dtype:
            half.copy_(piece)
            return False
        segment.rest(group.memory).split(0, piece.to("cpu", STATE_DTYPE), half)
        return True

    def publish_with(self, group: SubGroup, segment: Segment) -> None:
        """Have the new values in a slot handed to their parameter when the sub-group is written."""
        output = segment.output(group.memory)
        values = segment.master(group.memory) if output is None else output
        parameter, start = self._by_key[segment.key], segment.start

        def publish() -> list[StoreRequest]:
            return self._home.publish(parameter, start, values)

        self._swapper.written_with(group, publish)

    # --- for users ----------------------------------------------------------------------------

    def names(self, key: str) -> tuple[str, ...]:
        """What is to be saved of a parameter; its master unless the parameter is that."""
        item = self._item(key)
        return item.states if item.master is MasterForm.IN_PLACE else (MASTER, *item.states)

    def dtype(self, key: str, name: str) -> torch.dtype:
        """Of a state or a master."""
        return STATE_DTYPE if name == MASTER else self._item(key).state_dtype

    def read(self, key: str, name: str) -> Tensor:
        """A copy of a state, or of the master (fp32), flat, in host memory."""
        item = self._item(key)
        self._check_name(key, name)
        out = torch.empty(item.numel, dtype=self.dtype(key, name), device="cpu")

        def copy(group: SubGroup) -> None:
            for segment in group.layout.segments:
                if segment.key == key:
                    values = self._values(group, segment, name)
                    out[segment.start : segment.stop].copy_(values)

        self._swapper.look_at([key], copy)
        return out

    def stream(
        self,
        names: Mapping[str, Collection[str]],
        take: Callable[[str, str, int, Tensor], None],
    ) -> None:
        """Give these states, by key, to `take`(key, name, start, values), piece by piece, in the
        order in which they are stored; `values` are valid in the call only."""

        def give(group: SubGroup) -> None:
            for segment in group.layout.segments:
                for name in names.get(segment.key, ()):
                    values = self._values(group, segment, name)
                    take(segment.key, name, segment.start, values)

        self._swapper.look_at(names, give)

    def layouts(self, keys: Collection[str]) -> list[SubGroupLayout]:
        """The sub-groups that have to do with any of these, in the order of `look_at`."""
        return [group.layout for group in self._swapper.groups_of(keys)]

    def look_at(
        self,
        keys: Collection[str],
        look: Callable[[SubGroupLayout, Callable[[Segment, str], Tensor]], None],
    ) -> None:
        """Call `look`(layout, read) for each sub-group of `layouts`, in memory; `read`(segment,
        name) gives a state or an exact master, valid in the call only."""
        self._swapper.look_at(
            keys, lambda group: look(group.layout, partial(self._values, group))
        )

    def write(
        self,
        values: Mapping[str, Mapping[str, Source]],
        *,
        forget_rest: bool = False,
    ) -> None:
        """Replace states, and masters and with them the parameters, by key and name. Raises
        SwapUsageError, SwapManifestError for what does not fit before anything has changed. What a
        source or the drive raises comes midway: then all is refused until the same keys and names
        have been written, or a whole state loaded.

        With `forget_rest` the states of these keys that are not given become zeros, and, where
        masters are given, too, nothing is read: what the drive has lost doesn't matter."""
        for key, sources in values.items():
            for name, source in sources.items():
                self._check_name(key, name)
                self.check_numel(key, name, source)

        def replace(group: SubGroup) -> bool:
            for segment in group.layout.segments:
                for name, source in values.get(segment.key, {}).items():
                    piece = source.read(segment.start, segment.stop)
                    if name == MASTER:
                        self._replace_master(group, segment, piece)
                    else:
                        segment.state(group.memory, name).copy_(piece)
            return True

        renewed = {
            key
            for key, sources in values.items()
            if forget_rest
            and (MASTER in sources or self._item(key).master is MasterForm.IN_PLACE)
        }
        self._swapper.change(
            {key for key, sources in values.items() if sources} | renewed,
            replace,
            f"{_listed(values)} was written in part",
            lambda group: all(segment.key in renewed for segment in group.layout.segments),
        )

    def sort_out(
        self, key: str, state: Mapping[str, Source | Any]
    ) -> tuple[dict[str, Source], dict[str, Any]]:
        """The dense part of a saved state, and the scalars; a master that is missing is the
        parameter. Raises SwapManifestError for what does not fit."""
        item = self._item(key)
        known = (MASTER, *item.states)
        dense: dict[str, Source] = {name: state[name] for name in known if name in state}
        for name, source in dense.items():
            self.check_numel(key, name, source)
        is_stepped = bool(state.keys() - {MASTER})
        missing = [name for name in item.states if is_stepped and name not in state]
        if missing:
            raise SwapManifestError(
                f"{key}: the state to be loaded has no {missing[0]}",
                field=missing[0],
                fix="load what the same optimizer with the same options saved",
            )
        if MASTER not in dense and item.master is not MasterForm.IN_PLACE:
            values = self._home.initial_values(self._by_key[key])
            if values is not None:
                dense[MASTER] = Source.of(values)
        return dense, {
            name: value.whole() if isinstance(value, Source) else value
            for name, value in state.items()
            if name not in known
        }

    def check_numel(self, key: str, name: str, source: Source) -> None:
        """Raise SwapManifestError if a state to be loaded has another size."""
        numel = self._item(key).numel
        if source.numel != numel:
            raise SwapManifestError(
                f"{key}: the {name} to be loaded has {source.numel} elements, not {numel}",
                field="shape",
                fix="load the state of a model of the same shape (and number of ranks)",
            )

    # --- how ----------------------------------------------------------------------------------

    def _item(self, key: str) -> Any:
        return self._swapper.item(key) or self._home.item(self._by_key[key], (), STATE_DTYPE)

    def _check_name(self, key: str, name: str) -> None:
        item = self._item(key)
        if name != MASTER and name not in item.states and item.numel:
            raise SwapUsageError(
                f"{key} has no state called {name}", fix=f"it has {', '.join(self.names(key))}"
            )

    def _values(self, group: SubGroup, segment: Segment, name: str) -> Tensor:
        if name != MASTER:
            return segment.state(group.memory, name)
        if segment.item.master is not MasterForm.WHOLE:
            return self._exact(group, segment)
        edited = self._home.edited_values(self._by_key[segment.key])
        master = segment.master(group.memory)
        if edited is not None:
            master = master.clone()
            take_over_edits(master, edited[segment.start : segment.stop])
        return master

    def _exact(self, group: SubGroup, segment: Segment) -> Tensor:
        """Of a parameter that is its master, or half of it."""
        here = self._place(group, segment).to("cpu")
        if segment.item.master is MasterForm.IN_PLACE:
            return here
        if self._home.edited_values(self._by_key[segment.key]) is not None:
            return here.to(STATE_DTYPE)
        master = torch.empty(segment.numel, dtype=STATE_DTYPE, device="cpu")
        segment.rest(group.memory).join(0, here, master)
        return master

    def _replace_master(self, group: SubGroup, segment: Segment, values: Tensor) -> None:
        exact = values.to("cpu", STATE_DTYPE)
        if segment.item.master is MasterForm.IN_PLACE:
            self._place(group, segment).copy_(exact)
            return
        if segment.item.master is MasterForm.WHOLE:
            segment.master(group.memory).copy_(exact)
            output = segment.output(group.memory)
            if output is not None:
                output.copy_(exact)
        else:
            here = self._place(group, segment)
            halves = here if here.is_cpu else torch.empty_like(here, device="cpu")
            segment.rest(group.memory).split(0, exact.contiguous(), halves)
            here[:0].zero_()  # autograd's version counter
            if halves is not here:
                here.copy_(halves)
        if self._home.in_place(self._by_key[segment.key]) is None:
            self.publish_with(group, segment)

    def _place(self, group: SubGroup, segment: Segment) -> Tensor:
        """Where the parameter's own elements are: its memory, or the slot."""
        whole = self._home.in_place(self._by_key[segment.key])
        if whole is not None:
            return whole[segment.start : segment.stop]
        output = segment.output(group.memory)
        assert output is not None
        return output


def _listed(values: Mapping[str, Mapping[str, Source]]) -> str:
    if len(values) > 1:
        return "a state that was to be loaded"
    return " and ".join(f"the {name} of {key}" for key in values for name in values[key])
