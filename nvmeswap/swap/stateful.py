"""What a swapped optimizer keeps of its parameters, and how it goes in and out: state_dict,
checkpoint files, single values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from nvmeswap.errors import SwapManifestError, SwapUsageError
from nvmeswap.swap.saved_states import SavedStates, save_states
from nvmeswap.swap.states import Source
from nvmeswap.swap.stepping import SteppingOptimizer
from nvmeswap.swap.sub_group import MASTER

# How torch computes, not what: a state that is loaded leaves these as they are.
_HOW_IT_RUNS = ("fused", "foreach", "capturable", "differentiable")


class StatefulOptimizer(SteppingOptimizer):
    """The base of `SwappedOptimizer`: what is saved and loaded."""

    # Those whose exact values were given from outside, so that they are saved before any update.
    _given: set[str]

    # --- all of it ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's, and `master` where a parameter has one, all read into host
        memory. `save` streams it to a file instead."""
        self._refuse_in_a_step()
        packed = super().state_dict()  # the scalars
        state = {index: dict(scalars) for index, scalars in packed["state"].items()}
        places: dict[str, dict[str, torch.Tensor]] = {}
        for index, parameter in self._numbered():
            key = self._home.key_of(parameter)
            names = self._saved_names(key)
            if names or key in self._started:
                places[key] = {
                    name: torch.empty(
                        self._shape_of(key), dtype=self._states.dtype(key, name), device="cpu"
                    )
                    for name in names
                }
                state.setdefault(index, {}).update(places[key])

        def take(key: str, name: str, start: int, values: torch.Tensor) -> None:
            places[key][name].view(-1)[start : start + values.numel()].copy_(values)

        self._states.stream({key: list(names) for key, names in places.items()}, take)
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for what this, the plain optimizer or any other of ours saved. A parameter
        without state begins anew; where the state has a master, the parameter gets its values, else
        the master the parameter's. A step that is unfinished is forgotten.

        Raises SwapManifestError, before anything is changed, for a state of another size. After any
        other error load again.
        """
        loaded = {
            index: {
                name: Source.of(value) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            for index, state in state_dict["state"].items()
        }
        self._load(loaded, state_dict["param_groups"], state_dict)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file all that `state_dict` has, with no more than a sub-group in
        memory. It appears at `path` when it is complete, and not before.

        Raises SwapSpaceError, SwapPathError, SwapWriteError with an older file as it was.
        """
        self._refuse_in_a_step()
        numbers = {self._home.key_of(parameter): index for index, parameter in self._numbered()}
        names = {
            key: self._saved_names(key)
            for key in numbers
            if key in self._started or key in self._given
        }
        save_states(
            Path(path),
            Optimizer.state_dict(self),
            {
                key: {name: self._states.dtype(key, name) for name in its_names}
                for key, its_names in names.items()
            },
            {key: (numbers[key], self._shape_of(key)) for key in names},
            lambda take: self._states.stream(names, take),
        )

    def _saved_names(self, key: str) -> tuple[str, ...]:
        if key in self._started:
            return self._states.names(key)
        return (MASTER,) if key in self._given and MASTER in self._states.names(key) else ()

    def load(self, path: str | Path) -> None:
        """As `load_state_dict`, from a file that `save` wrote, streamed. Raises SwapPathError,
        SwapReadError, SwapManifestError for another file."""
        with SavedStates(Path(path)) as saved:
            self._load(saved.states, saved.param_groups, {})

    def _load(
        self,
        loaded: Mapping[int, Mapping[str, Source | Any]],
        groups: list[dict[str, Any]],
        rest: Mapping[str, Any],
    ) -> None:
        swapper = self._attached()
        numbers = [index for group in groups for index in group["params"]]
        states, scalars = {}, {}
        for (_, parameter), number in zip(self._numbered(), numbers, strict=False):
            if parameter in self._owned and parameter.numel():  # an empty one has no state
                key = self._home.key_of(parameter)
                sorted_out = self._states.sort_out(key, loaded.get(number, {}))
                states[key], scalars[key] = sorted_out
        kept = [
            (
                {name: group[name] for name in _HOW_IT_RUNS if name in group},
                [name for name, value in group.items() if isinstance(value, tuple)],  # not in JSON
            )
            for group in self.param_groups
        ]
        super().load_state_dict({**rest, "state": {}, "param_groups": groups})
        for group, (how, tuples) in zip(self.param_groups, kept, strict=True):
            group.update(how)
            for name, default in self.defaults.items():  # what older versions of torch did not have
                group.setdefault(name, default)
            group.update({name: tuple(group[name]) for name in tuples if name in group})
        self._forget_step()
        names = {
            self._home.key_of(parameter): loaded.get(number, {}).keys()
            for (_, parameter), number in zip(self._numbered(), numbers, strict=False)
        }
        started = {key for key in states if names[key] - {MASTER}}
        self._states.write(states, forget_rest=True)
        self.state.clear()
        for key in started:
            self.state[self._by_key[key]] = self._rule.modern(scalars[key])
        self._started = started
        self._given = {key for key in states if MASTER in names[key]}
        self._home.forget_edits(self._by_key.values())
        swapper.mend()

    @property
    def class_name(self) -> str:
        """Of the optimizer class that makes the updates."""
        return self._rule.class_name

    def is_started(self, key: str) -> bool:
        """True if it has been updated, and so has states."""
        return key in self._started

    def refuse_unfinished(self) -> None:
        """Raise SwapUsageError if there is nothing whole to be saved: a step is unfinished, or a
        state half written."""
        self._refuse_in_a_step()

    def check_states(
        self, states: Mapping[str, Mapping[str, Source | Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise SwapManifestError if `load_states` would refuse these; nothing is changed."""
        if self._keys_by_group() != [list(group["params"]) for group in groups]:
            raise SwapManifestError(
                "the saved param_groups have other parameters",
                field="param_groups",
                fix="build the optimizer with the groups, and the frozen parameters, of the run "
                "that saved",
            )
        for group in groups:
            options = {**self.defaults, **group}
            for key in group["params"]:
                item = self._attached().item(key)
                if item is not None and set(self._rule.states_of(options)) != set(item.states):
                    raise SwapManifestError(
                        f"the saved options need the states {self._rule.states_of(options)}, this "
                        f"optimizer has {item.states}",
                        field="param_groups",
                        fix="build the optimizer with the options of the run that saved",
                    )
        for key, state in states.items():
            self._states.sort_out(key, state)

    def load_states(
        self, states: Mapping[str, Mapping[str, Source | Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """As `load_state_dict`, with parameters by key, here and in the groups' "params"; streamed
        from the sources. After `check_states`."""
        number = {self._home.key_of(parameter): index for index, parameter in self._numbered()}
        self._load(
            {number[key]: state for key, state in states.items()},
            [{**group, "params": [number[key] for key in group["params"]]} for group in groups],
            {},
        )

    def _keys_by_group(self) -> list[list[str]]:
        return [
            [self._home.key_of(parameter) for parameter in group["params"]]
            for group in self.param_groups
        ]

    # --- of one parameter ---------------------------------------------------------------------

    def read_state(self, parameter: torch.Tensor, name: str = MASTER) -> torch.Tensor:
        """A copy of a parameter's exact fp32 value ("master"), or of one of its states, in its
        shape; zeros where it was never updated."""
        key = self._key_of(parameter)
        if name != MASTER and key not in self._started:
            return torch.zeros(self._shape_of(key), dtype=self._state_dtype, device="cpu")
        return self._states.read(key, name).view(self._shape_of(key))

    def write_state(
        self, parameter: torch.Tensor, values: torch.Tensor, name: str = MASTER
    ) -> None:
        """Replace a parameter's exact fp32 value (and with it the parameter), or one of its
        states. If the drive fails meanwhile, all else is refused until the same call succeeds."""
        key = self._key_of(parameter, may_be_torn=True)
        if name != MASTER and key not in self._started:
            raise SwapUsageError(f"a parameter that was never updated has no {name}")
        self._states.write({key: {name: Source.of(values)}})
        if name == MASTER:
            self._given.add(key)
            self._home.forget_edits([parameter])

    def _shape_of(self, key: str) -> tuple[int, ...]:
        return tuple(self._home.shape(self._by_key[key]))

    def _key_of(self, parameter: torch.Tensor, *, may_be_torn: bool = False) -> str:
        self._refuse_in_a_step(may_be_torn=may_be_torn)
        if parameter not in self._owned:
            raise SwapUsageError("that parameter is not one of this optimizer's")
        return self._home.key_of(parameter)

    def _numbered(self) -> list[tuple[int, torch.Tensor]]:
        """Parameters with the numbers that a state_dict knows them by."""
        return list(enumerate(p for group in self.param_groups for p in group["params"]))

    def __getstate__(self) -> dict[str, Any]:
        raise SwapUsageError(
            "a swapped optimizer can't be copied or pickled", fix="save its state_dict()"
        )
