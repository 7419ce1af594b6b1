"""The first values of a model's parameters and buffers, one module at a time.

What is on the meta device has no values yet. In the order of `model.modules()` each module that
has parameters or buffers is made in host memory, initialised as a whole or read from files, and
this rank's part goes where it is to live; then it is freed. All ranks draw the same numbers and
keep their parts of them, so weights do not depend on how many ranks there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nvmeswap.errors import SwapUsageError
from nvmeswap.memory.heap import release_freed_memory
from nvmeswap.swap.params import PartitionedParamSwapper
from nvmeswap.swap.weights import Weights, names_in_files
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.entries import Entry, entries_of
from nvmeswap.zero3.initialise import (
    Call,
    Initialise,
    Initialiser,
    initialise_modules,
    refuse_without_initialiser,
)

# Freed memory goes back to the system whenever it is so much.
_RELEASE_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FirstValues:
    """Where they come from: files with all of them, or else `initialise(module)`, or else the
    modules' own way. What is in memory keeps its values, unless there are files."""

    weights: str | Path | None = None
    initialise: Initialise | None = None


@dataclass(eq=False, slots=True)
class _Unit:
    """Modules that get their values together, nearly always one.

    `entries`: the parameters that no unit before it has. `buffers`: those that are to get values.
    `calls`: what initialises it; none if nothing is to be drawn.
    """

    name: str
    modules: list[nn.Module]
    entries: list[Entry]
    buffers: list[Tensor]
    calls: list[Call]
    wanted: set[int]


class Materialiser:
    """Gives a sharded model its first values.

        materialiser = Materialiser(model, entries, FirstValues())
        materialiser.write_to(params)
        materialiser.values(entry)   # in the order of the entries, some may be left out
        materialiser.finish()
        materialiser.install()       # the model has no meta tensor any more

    A parameter tied to several modules has what the first of them gives it. Until `install` the
    model is as it was, but for what files load over shards in memory.

    Raises: SwapUsageError, SwapManifestError and SwapPathError by the constructor, before any value
    was made: no way to initialise a module; names or shapes in the files that do not fit.
    Blocking: all but `install`. Threads: one at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[Entry],
        source: FirstValues,
    ) -> None:
        self._model = model
        self._params: PartitionedParamSwapper | None = None
        self._weights = None if source.weights is None else Weights(source.weights)
        self._resident: list[tuple[Entry, Tensor]] = []  # with its padding
        self._buffers: dict[int, Tensor] = {}
        self._current: dict[str, Tensor] = {}
        self._passed: set[str] = set()
        self._freed_nbytes = 0
        try:
            _refuse_unsharded(model, entries, all_of_them=self._weights is not None)
            self._names = {} if self._weights is None else names_in_files(model, self._weights)
            initialiser = Initialiser(model, source.initialise)
            if self._weights is None:
                initialiser.refuse_what_is_not_called(model)
            units = list(self._units(entries, initialiser))
            self._parts = {
                entry.key: fsdp.part_of_whole(entry.record)
                for entry in entries
                if self._weights is not None or entry.local is None
            }
        except BaseException:
            self.close()
            raise
        self._device: torch.device = entries[0].record.device
        self._left = iter(units)
        for entry in entries:
            if entry.local is None and not entry.swapped:
                self._make_room(entry)

    def _units(self, entries: Sequence[Entry], initialiser: Initialiser) -> Iterator[_Unit]:
        by_parameter = {id(entry.parameter): entry for entry in entries}
        seen: set[int] = set()
        for name, module in self._model.named_modules():
            if id(module) in seen:
                continue
            modules = initialiser.together(name, module)
            seen.update(map(id, modules))
            parameters = [p for each in modules for p in each.parameters(recurse=False)]
            buffers = [
                buffer
                for each in modules
                for buffer in each.buffers(recurse=False)
                if buffer.is_meta or id(buffer) in self._names
            ]
            owned = [
                by_parameter.pop(id(p)) for p in parameters if id(p) in by_parameter
            ]
            to_draw = [*(entry.parameter for entry in owned), *buffers]
            wanted = {id(t) for t in to_draw if t.is_meta and id(t) not in self._names}
            # One that is tied to an earlier module draws nevertheless, as when built in memory.
            draws = wanted or any(p.is_meta and id(p) not in self._names for p in parameters)
            calls = initialiser.calls(name, module) if draws else []
            if wanted and not calls:
                refuse_without_initialiser(name, module)
            if owned or buffers or calls:
                yield _Unit(name, modules, owned, buffers, calls, wanted)

    def _make_room(self, entry: Entry) -> None:
        """For a shard that stays in memory, with FSDP2's padding behind it."""
        padded = torch.zeros(
            entry.padded_shape, dtype=entry.parameter.dtype, device=entry.record.device
        )
        entry.local = padded[tuple(map(slice, entry.shape))]
        self._resident.append((entry, padded.view(-1)))

    def write_to(self, params: PartitionedParamSwapper) -> None:
        """Where values of swapped entries are written from now on."""
        self._params = params

    def values(self, entry: Entry) -> Tensor:
        """This rank's part, flat, in the parameter's dtype, valid until a later entry is asked
        for."""
        with torch.no_grad():
            while entry.key not in self._passed:
                self._pass(next(self._left))
        return self._current[entry.key] if entry.local is None else entry.local.view(-1)

    def finish(self) -> None:
        """Do what no call of `values` needed."""
        with torch.no_grad():
            for unit in self._left:
                self._pass(unit)
        self._forget_current()
        self.close()

    def install(self) -> None:
        """Put what stays in memory into the model: buffers, and shards that are not swapped."""
        for entry, padded in self._resident:
            assert entry.local is not None
            fsdp.replace_local_tensor(entry.record, entry.local, padded)
        with torch.no_grad():
            for module in self._model.modules():
                for name, buffer in module._buffers.items():
                    values = None if buffer is None else self._buffers.get(id(buffer))
                    if buffer is None or values is None:
                        continue
                    if buffer.is_meta:
                        module._buffers[name] = values
                    else:
                        buffer.copy_(values)

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._weights is not None:
            self._weights.close()

    # --- one unit -----------------------------------------------------------------------------

    def _pass(self, unit: _Unit) -> None:
        self._forget_current()
        drawn: Mapping[int, Tensor] = {}
        if unit.calls:
            drawn = initialise_modules(unit.name, unit.modules, unit.calls, unit.wanted)
        for entry in unit.entries:
            flat = self._part(entry, drawn)
            if entry.swapped and self._params is not None:
                self._params.write(entry.key, flat)
            if entry.local is None:
                self._current[entry.key] = flat
            self._passed.add(entry.key)
        for buffer in unit.buffers:
            if id(buffer) in self._names:
                values = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
                self._read(buffer, 0, values)
            else:
                values = drawn[id(buffer)].detach().to(self._device)
            self._buffers.setdefault(id(buffer), values)
        self._freed_nbytes += sum(tensor.nbytes for tensor in drawn.values())

    def _forget_current(self) -> None:
        self._freed_nbytes += sum(flat.nbytes for flat in self._current.values())
        self._current.clear()
        if self._freed_nbytes >= _RELEASE_NBYTES:
            release_freed_memory()
            self._freed_nbytes = 0

    def _part(self, entry: Entry, drawn: Mapping[int, Tensor]) -> Tensor:
        """This rank's values, flat; those of a shard that is in memory are put there."""
        parameter, local = entry.parameter, entry.local
        if id(parameter) in self._names:
            values = self._part_in_files(entry)
        elif parameter.is_meta:
            values = drawn[id(parameter)].detach()[self._parts[entry.key]]
        else:
            assert local is not None
            return local.view(-1)
        if local is None:
            return values.reshape(-1)
        if values is not local:
            local.copy_(values)
        return local.view(-1)

    def _part_in_files(self, entry: Entry) -> Tensor:
        parameter, part = entry.parameter, self._parts[entry.key]
        rows_only = all(
            each.stop - each.start == count
            for each, count in zip(part[1:], parameter.shape[1:], strict=True)
        )
        if not rows_only:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            self._read(parameter, 0, whole)
            return whole[part]
        values = entry.local
        if values is None:
            values = torch.empty(entry.shape, dtype=parameter.dtype, device="cpu")
        if entry.numel:
            self._read(parameter, part[0].start * parameter.shape[1:].numel(), values)
        return values

    def _read(self, tensor: Tensor, start: int, out: Tensor) -> None:
        assert self._weights is not None
        self._weights.read(self._names[id(tensor)], start, out)


def _refuse_unsharded(model: nn.Module, entries: Sequence[Entry], *, all_of_them: bool) -> None:
    """FSDP2 was told to ignore a parameter, so nobody here gives it values."""
    known = {id(entry.parameter) for entry in entries}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known and (parameter.is_meta or all_of_them):
            raise SwapUsageError(
                f"{name} is not sharded, so it gets no values here",
                fix="leave ignored_params out of fully_shard, or build and load the model in "
                "memory",
            )


def materialise(model: nn.Module, values: FirstValues) -> None:
    """First values for a sharded model that stays in memory. Raises as `Materialiser`."""
    on_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if values.weights is not None or on_meta:
        with closing(Materialiser(model, entries_of(model, swapped=False), values)) as first:
            first.finish()
            first.install()


def refuse_different_seeds(agreement: Agreement) -> None:
    """Raise SwapUsageError, on all ranks, if they would draw different numbers: parts of different
    models, and copies that differ. A collective."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:8]
    mine = torch.tensor(list(state), dtype=torch.uint8, device=agreement.device)
    theirs = torch.empty(dist.get_world_size() * len(state), dtype=torch.uint8, device=mine.device)
    dist.all_gather_into_tensor(theirs, mine)
    if not (theirs.view(-1, len(state)) == mine).all():
        raise SwapUsageError(
            "the ranks' random numbers differ, and so would the weights that they draw",
            fix="call torch.manual_seed with the same seed on all ranks before shard()",
        )
