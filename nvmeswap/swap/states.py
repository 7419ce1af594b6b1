"""States of single parameters, read and written outside a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.store.store import StoreRequest
from nvmeswap.swap.home import ParameterHome
from nvmeswap.swap.optimizer import PipelinedOptimizerSwapper
from nvmeswap.swap.sub_group import MASTER, STATE_DTYPE, MasterForm, Segment
from nvmeswap.swap.traffic import SubGroup


class OptimizerStates:
    """Masters and states by key and name, whatever form and place they have; flat tensors.

    Blocking: all but `publish_with` wait for the disk. Threads: the training loop's; what is
    called by a visit, on the swapper's.
    """

    def __init__(
        self,
        swapper: PipelinedOptimizerSwapper,
        home: ParameterHome,
        by_key: Mapping[str, torch.Tensor],
    ) -> None:
        self._swapper = swapper
        self._home = home
        self._by_key = by_key

    # --- for visits ---------------------------------------------------------------------------

    def fill_in_masters(self, group: SubGroup) -> bool:
        """A visit: the first masters, as the parameters are. (A split one that is its parameter has
        a rest of zeros, which is what the memory holds.)"""
        changed = False
        for segment in group.layout.segments:
            if segment.item.master is MasterForm.WHOLE:
                values = self._home.initial_values(self._by_key[segment.key])
                assert values is not None
                segment.master(group.memory).copy_(values[segment.start : segment.stop])
                changed = True
        return changed

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

    def read(self, key: str, name: str) -> torch.Tensor:
        """A copy of a state, or of the master (fp32), flat, in host memory."""
        item = self._item(key)
        self._check_name(key, name)
        dtype = STATE_DTYPE if name == MASTER else item.state_dtype
        out = torch.empty(item.numel, dtype=dtype)

        def copy(group: SubGroup, segment: Segment) -> None:
            out[segment.start : segment.stop].copy_(self._values(group, segment, name))

        self._swapper.each_segment(key, copy, changes=False)
        return out

    def write(self, key: str, values: Mapping[str, torch.Tensor]) -> None:
        """Replace states, and the master and with it the parameter, from flat or shaped tensors of
        any dtype and device."""
        for name, value in values.items():
            self._check_name(key, name)
            self._check_numel(key, name, value)
        flat = {name: value.detach().reshape(-1) for name, value in values.items()}

        def replace(group: SubGroup, segment: Segment) -> None:
            for name, value in flat.items():
                piece = value[segment.start : segment.stop]
                if name == MASTER:
                    self._replace_master(group, segment, piece)
                else:
                    segment.state(group.memory, name).copy_(piece)

        self._swapper.each_segment(key, replace, changes=True)

    def sort_out(
        self, loaded: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
        """States and scalars of a state_dict, by key; masters that are missing are the parameters.
        Raises SwapManifestError for what does not fit."""
        states: dict[str, dict[str, torch.Tensor]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for key, state in loaded.items():
            item = self._item(key)
            dense = {name: state[name] for name in (MASTER, *item.states) if name in state}
            for name, value in dense.items():
                self._check_numel(key, name, value)
            missing = [name for name in item.states if state and name not in state]
            if missing:
                raise SwapManifestError(
                    f"{key}: the state to be loaded has no {missing[0]}",
                    field=missing[0],
                    fix="load what the same optimizer with the same options saved",
                )
            values = self._home.initial_values(self._by_key[key])
            if MASTER not in dense and item.master is not MasterForm.IN_PLACE and values is not None:
                dense[MASTER] = values
            states[key] = dense
            scalars[key] = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
                if name not in dense and name != MASTER
            }
        return states, scalars

    # --- how ----------------------------------------------------------------------------------

    def _item(self, key: str) -> Any:
        return self._swapper.item(key) or self._home.item(self._by_key[key], (), STATE_DTYPE)

    def _check_name(self, key: str, name: str) -> None:
        item = self._item(key)
        if name != MASTER and name not in item.states and item.numel:
            raise SwapUsageError(
                f"{key} has no state called {name}", fix=f"it has {', '.join(self.names(key))}"
            )

    def _check_numel(self, key: str, name: str, value: torch.Tensor) -> None:
        numel = self._item(key).numel
        if value.numel() != numel:
            raise SwapManifestError(
                f"{key}: the {name} to be loaded has {value.numel()} elements, not {numel}",
                field="shape",
                fix="load the state of a model of the same shape (and number of ranks)",
            )

    def _values(self, group: SubGroup, segment: Segment, name: str) -> torch.Tensor:
        if name != MASTER:
            return segment.state(group.memory, name)
        if segment.item.master is MasterForm.WHOLE:
            return segment.master(group.memory)
        here = self._place(group, segment)
        if segment.item.master is MasterForm.IN_PLACE:
            return here
        master = torch.empty(segment.numel, dtype=STATE_DTYPE)
        segment.rest(group.memory).join(0, here, master)
        return master

    def _replace_master(self, group: SubGroup, segment: Segment, values: torch.Tensor) -> None:
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
            segment.rest(group.memory).split(0, exact.contiguous(), here)
            here[:0].zero_()  # autograd's version counter
        if self._home.in_place(self._by_key[segment.key]) is None:
            self.publish_with(group, segment)

    def _place(self, group: SubGroup, segment: Segment) -> torch.Tensor:
        """Where the parameter's own elements are: its memory, or the slot."""
        whole = self._home.in_place(self._by_key[segment.key])
        if whole is not None:
            return whole[segment.start : segment.stop]
        output = segment.output(group.memory)
        assert output is not None
        return output
