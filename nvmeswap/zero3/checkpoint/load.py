"""`load()`: back into a model and its optimizer, with any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nvmeswap.errors import SwapManifestError, SwapPathError, SwapUsageError
from nvmeswap.swap.states import Source
from nvmeswap.swap.sub_group import MASTER
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.checkpoint.contents import (
    EXTRA,
    MODEL,
    PARAM_GROUPS,
    PIECE_NUMEL,
    model_name,
    state_name,
)
from nvmeswap.zero3.checkpoint.folder import MARKER, complete_ones, log
from nvmeswap.zero3.checkpoint.model import Parameter, buffers_of, parameters_of, tied_names
from nvmeswap.zero3.checkpoint.peers import Peers
from nvmeswap.zero3.checkpoint.reader import SavedTensors
from nvmeswap.zero3.optimizer import ShardedOptimizer

State = dict[str, Source | Any]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `load` found. `extra` is what this rank gave to `save`; a rank that there was not then
    gets rank 0's. `world_size`: of the run that saved. Nothing found: step 0, no path."""

    step: int
    extra: Any
    path: Path | None
    world_size: int


def load(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str | Path,
    *,
    step: int | None = None,
    missing_ok: bool = False,
) -> Resumed:
    """Bring model and optimizer to what `save` wrote last in this folder, or at `step`.

        resumed = nvmeswap.zero3.load(model, optimizer, "checkpoints", missing_ok=True)
        for step in range(resumed.step, 1000): ...

    The number of ranks, sub-group sizes, precision of what is stored and places of the shards may
    all be others than those of the run that saved: exact values go to the masters. Streamed: a
    sub-group of a shard is in memory beside what is being read. Gradients are forgotten. Rank 0
    decides what there is, so that ranks whose filesystems disagree don't go different ways.

    Raises, on all ranks: SwapPathError (no complete checkpoint, unless `missing_ok`),
    SwapManifestError before anything has changed, its `field` naming what does not fit ("shape",
    "missing", "unexpected", "tied", "optimizer", "param_groups", or a state); SwapReadError on the
    rank where it happened, SwapPeerError on the others: then both are partly loaded, and every
    `step` and `save` is refused until a load succeeds.
    Blocking: until all is read. Threads: the training loop's, on all ranks.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise SwapUsageError(
            "this optimizer is not swapped",
            fix="use torch.distributed.checkpoint for a model without offload",
        )
    fsdp.reshard_all(model)  # an evaluation leaves the root gathered
    peers = Peers(model)
    found = peers.from_rank_0(lambda: _find(Path(folder), step))
    if found is None:
        if not missing_ok:
            raise SwapPathError(
                "there is no complete checkpoint here" if step is None
                else f"there is no complete checkpoint of step {step} here",
                path=folder, fix="name the folder that save() was given, or missing_ok=True",
            )
        if peers.rank == 0:
            log.warning("no checkpoint in %s: starting anew", folder)
        return Resumed(0, None, None, peers.world_size)
    path, info = found
    saved, states = peers.together(lambda: _check(model, optimizer, path, info))
    swapper = optimizer.swapper
    try:
        torn = "a checkpoint was loaded in part"
        swapper.tear(torn)
        peers.together(lambda: _fill(model, optimizer, saved, states))
    except BaseException:
        swapper.tear(torn)
        raise
    optimizer.zero_grad()
    fsdp.reshard_all(model)
    extra = peers.together(lambda: _extra(saved, peers.rank))
    if peers.rank == 0:
        log.warning("resumed from %s: what was trained after step %d is lost", path, info["step"])
    return Resumed(info["step"], extra, path, info["world_size"])


def _find(folder: Path, step: int | None) -> tuple[Path, dict[str, Any]] | None:
    """The newest, as rank 0 sees it."""
    folder = folder.absolute()
    saved = [each for each in complete_ones(folder) if step in (None, each.step)]
    return (saved[-1].path, dict(saved[-1].info)) if saved else None


def _check(
    model: nn.Module, optimizer: ShardedOptimizer, path: Path, info: Mapping[str, Any]
) -> tuple[SavedTensors, dict[str, State]]:
    """Raise what does not fit; else the checkpoint, and the optimizer's part of it by key."""
    if info["optimizer"] != optimizer.class_name:
        raise SwapManifestError(
            f"the checkpoint is of {info['optimizer']}, this optimizer is {optimizer.class_name}",
            field="optimizer", path=path, fix="build the optimizer that was saved",
        )
    _check_files(path, info["files"])
    saved = SavedTensors(path)
    parameters = {each.name: each for each in parameters_of(model)}
    _check_names(model, parameters, saved, info)
    for parameter in parameters.values():
        _check_shape(saved, model_name(parameter.name), parameter.global_shape)
    for name, buffer in buffers_of(model):
        _check_shape(saved, model_name(name), buffer.shape)
    states = {
        key: _state(saved, parameters[key])
        for key, _ in optimizer.parameters()
        if parameters[key].numel
    }
    optimizer.check_states(states, saved.value(PARAM_GROUPS))
    return saved, states


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, nbytes in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            size = -1
        if size < nbytes:
            raise SwapManifestError(
                f"{name} of a checkpoint is "
                + ("missing" if size < 0 else f"{size:_} bytes long, not {nbytes:_}"),
                field="files", path=path, fix=f"resume from an older one; {MARKER} lists its files",
            )


def _check_names(
    model: nn.Module,
    parameters: Mapping[str, Parameter],
    saved: SavedTensors,
    info: Mapping[str, Any],
) -> None:
    tied = {model_name(a): model_name(b) for a, b in tied_names(model).items()}
    ours = {model_name(name) for name in parameters}
    ours |= {model_name(name) for name, _ in buffers_of(model)} | tied.keys()
    theirs = {name for name in saved.names if name.startswith(f"{MODEL}.")}
    for field, names in (("missing", ours - theirs), ("unexpected", theirs - ours)):
        if names:
            names_only = sorted(name.partition(".")[2] for name in names)
            raise SwapManifestError(
                f"{field} in the checkpoint: {', '.join(names_only[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
                field=field, path=saved.path, fix="build the model that was saved",
            )
    for alias, owner in tied.items():
        if info["tied"].get(alias, alias) != info["tied"].get(owner, owner):
            raise SwapManifestError(
                f"{alias.partition('.')[2]} is tied here, and has values of its own in the "
                "checkpoint",
                field="tied", path=saved.path, fix="build the model without that tie",
            )


def _check_shape(saved: SavedTensors, name: str, shape: torch.Size) -> None:
    if saved.shape(name) != shape:
        raise SwapManifestError(
            f"{name} has the shape {tuple(saved.shape(name) or ())} in the checkpoint, and "
            f"{tuple(shape)} here",
            field="shape", path=saved.path, fix="build the model that was saved",
        )


def _state(saved: SavedTensors, parameter: Parameter) -> State:
    """Master and states of this rank's part, and scalars, by name."""
    exact = state_name(parameter.name, MASTER)
    if exact not in saved.names:
        exact = model_name(parameter.name)
    state: State = {MASTER: saved.source(exact, parameter.shape, parameter.offsets)}
    prefix = state_name(parameter.name, "")
    for name in saved.names_under(prefix):
        short = name[len(prefix) :]
        shape = saved.shape(name)
        if short == MASTER:
            continue
        if shape is None or not shape:
            state[short] = saved.value(name)
        else:
            _check_shape(saved, name, parameter.global_shape)
            state[short] = saved.source(name, parameter.shape, parameter.offsets)
    return state


def _fill(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    saved: SavedTensors,
    states: Mapping[str, State],
) -> None:
    """Read it all. The swapper is mended by the last call in it."""
    for parameter in parameters_of(model):
        state = states.get(parameter.name)
        if state is None or MASTER not in optimizer.states.names(parameter.name):
            _write_values(parameter, saved)
    for name, buffer in buffers_of(model):
        buffer.copy_(saved.value(model_name(name)))
    optimizer.load_states(states, saved.value(PARAM_GROUPS))


def _write_values(parameter: Parameter, saved: SavedTensors) -> None:
    """A parameter that is frozen, or its own master."""
    source = saved.source(model_name(parameter.name), parameter.shape, parameter.offsets)
    for start in range(0, parameter.numel, PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, parameter.numel)
        parameter.write(start, source.read(start, stop))


def _extra(saved: SavedTensors, rank: int) -> Any:
    name = f"{EXTRA}.{rank}"
    if name not in saved.names:
        name = f"{EXTRA}.0"
    return saved.value(name) if name in saved.names else None
