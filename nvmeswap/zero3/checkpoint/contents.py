"""What is saved of a model and its optimizer, under which names, and where it comes from.

    model.<name>                       values as state_dict() shows them: of a trained parameter its
                                       exact fp32 master, rounded to the parameter's own dtype
    optimizer.state.<name>.<state>     exp_avg, step, ...; "master" too where the model has less
    optimizer.param_groups             the options, with parameters by name
    extra.<rank>                       what the user gave on that rank

These are the names that plain FSDP2 gives to {"model": model.state_dict()} and to torch's
get_optimizer_state_dict. Tensors come in buckets: a sub-group of the optimizer's, or a piece of a
frozen shard. One bucket is in memory at a time, and becomes one file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nvmeswap.errors import SwapUsageError
from nvmeswap.swap.sub_group import MASTER, STATE_DTYPE, Segment
from nvmeswap.zero3.checkpoint.boxes import Box, boxes_of
from nvmeswap.zero3.checkpoint.model import Parameter, buffers_of, parameters_of, tied_names
from nvmeswap.zero3.optimizer import ShardedOptimizer

# A piece of a shard that has no optimizer state.
PIECE_NUMEL = 4 * 1024 * 1024
MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
PARAM_GROUPS = f"{OPTIMIZER}.param_groups"
Resolve = Callable[[MetadataIndex], Tensor]
Take = Callable[[int, Resolve], None]


class Streamed(Protocol):
    """What a writer needs: `Contents` says what each of these is."""

    small: dict[str, Any]
    paths: dict[str, tuple[str, ...]]
    tied: dict[str, str]

    def items(self) -> Iterator[WriteItem]: ...

    def bucket_of(self) -> dict[MetadataIndex, int]: ...

    def visit(self, take: Take) -> None: ...


def model_name(name: str) -> str:
    """What a parameter or buffer is called in a checkpoint."""
    return f"{MODEL}.{name}"


def state_name(name: str, state: str) -> str:
    """What a parameter's optimizer state is called in a checkpoint."""
    return f"{OPTIMIZER}.state.{name}.{state}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor and where to get it: a state of a segment, or a shard's own values."""

    parameter: Parameter
    box: Box
    dtype: torch.dtype
    segment: Segment | None = None
    state: str = MASTER


@dataclass(slots=True)
class _Bucket:
    items: list[WriteItem] = field(default_factory=list)
    pieces: dict[MetadataIndex, _Piece] = field(default_factory=dict)

    def add(self, name: str, piece: _Piece) -> None:
        parameter, box = piece.parameter, piece.box
        offsets = box.moved(parameter.offsets)
        index = MetadataIndex(name, offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)),
            properties=TensorProperties(dtype=piece.dtype),
            size=parameter.global_shape,
        )
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.pieces[index] = piece


class Contents:
    """This rank's part of a checkpoint, listed; nothing has been read.

    Attributes: `small`, by name, what is in memory anyway; `paths`, where each name belongs in a
    nested state_dict; `tied`, other names of a tensor and the one that it is saved under; `step`,
    the number of updates, if the optimizer counts them.
    Raises SwapUsageError in the middle of a step, or for an `extra` that can't be pickled.
    """

    def __init__(
        self, model: nn.Module, optimizer: ShardedOptimizer, extra: Any, rank: int
    ) -> None:
        optimizer.refuse_unfinished()
        _refuse_extra_state(model)
        self._optimizer = optimizer
        self.small: dict[str, Any] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self.tied = {model_name(a): model_name(b) for a, b in tied_names(model).items()}
        self.step: int | None = None
        self._buckets: list[_Bucket] = []
        self._room = 0  # of the last bucket, in elements of shards
        trained = dict(optimizer.parameters())
        parameters = {each.name: each for each in parameters_of(model)}
        self._layouts = optimizer.states.layouts(trained)
        for layout in self._layouts:
            self._add_sub_group(layout.segments, parameters)
        for name, parameter in parameters.items():
            self._path(model_name(name), MODEL, name)
            if name in trained:
                self._add_scalars(name, trained[name])
            else:
                self._add_shard(parameter)
        for alias in self.tied:
            self._path(alias, MODEL, alias.partition(".")[2])
        for name, buffer in buffers_of(model):
            self._put(buffer.detach(), MODEL, name)
        self._put(_groups(optimizer), OPTIMIZER, "param_groups")
        if extra is not None:
            _refuse_what_is_no_data(extra)
            self._put(extra, EXTRA, str(rank))

    def _add_sub_group(
        self, segments: Sequence[Segment], parameters: dict[str, Parameter]
    ) -> None:
        bucket = _Bucket()
        states = self._optimizer.states
        for segment in segments:
            name, parameter = segment.key, parameters[segment.key]
            wanted = [(model_name(name), MASTER, parameter.dtype)]
            if parameter.dtype is not STATE_DTYPE:
                wanted.append((state_name(name, MASTER), MASTER, STATE_DTYPE))
                self._path(state_name(name, MASTER), OPTIMIZER, "state", name, MASTER)
            for state in states.names(name):
                if state != MASTER and self._optimizer.is_started(name):
                    wanted.append((state_name(name, state), state, states.dtype(name, state)))
                    self._path(state_name(name, state), OPTIMIZER, "state", name, state)
            for full_name, state, dtype in wanted:
                for box in boxes_of(parameter.shape, segment.start, segment.stop):
                    bucket.add(full_name, _Piece(parameter, box, dtype, segment, state))
        self._buckets.append(bucket)

    def _add_shard(self, parameter: Parameter) -> None:
        """Many small ones share a bucket."""
        start = 0
        while start < parameter.numel:
            if not self._room:
                self._buckets.append(_Bucket())
                self._room = PIECE_NUMEL
            stop = min(start + self._room, parameter.numel)
            for box in boxes_of(parameter.shape, start, stop):
                piece = _Piece(parameter, box, parameter.dtype)
                self._buckets[-1].add(model_name(parameter.name), piece)
            self._room -= stop - start
            start = stop

    def _add_scalars(self, name: str, parameter: Tensor) -> None:
        for scalar, value in self._optimizer.state.get(parameter, {}).items():
            self._put(value, OPTIMIZER, "state", name, scalar)
            if scalar == "step":
                self.step = max(self.step or 0, int(value))

    def _put(self, value: Any, *path: str) -> None:
        name = ".".join(path)
        self.small[name] = value
        self._path(name, *path)

    def _path(self, name: str, *path: str) -> None:
        self.paths[name] = path

    @property
    def nbytes(self) -> int:
        """Of this rank's tensors, apart from what is small."""
        return sum(
            piece.box.numel * piece.dtype.itemsize
            for bucket in self._buckets
            for piece in bucket.pieces.values()
        )

    # --- for the writer -----------------------------------------------------------------------

    def items(self) -> Iterator[WriteItem]:
        """What is to be written, apart from what is small."""
        for bucket in self._buckets:
            yield from bucket.items

    def bucket_of(self) -> dict[MetadataIndex, int]:
        """The number of the bucket that each item comes in."""
        return {index: n for n, bucket in enumerate(self._buckets) for index in bucket.pieces}

    def visit(self, take: Take) -> None:
        """Call `take`(number, resolve) for each bucket while it is in memory; `resolve` gives its
        items, on the host, valid in the call only. Waits for the disk."""
        number = 0

        def take_group(segments: object, read: Callable[[Segment, str], Tensor]) -> None:
            nonlocal number
            pieces = self._buckets[number].pieces
            values: dict[tuple[int, str], Tensor] = {}

            def resolve(index: MetadataIndex) -> Tensor:
                piece = pieces[index]
                assert piece.segment is not None
                place = (id(piece.segment), piece.state)
                if place not in values:
                    values.clear()  # a joined master takes memory: one at a time
                    values[place] = read(piece.segment, piece.state)
                begin = piece.box.start - piece.segment.start
                flat = values[place][begin : begin + piece.box.numel]
                return flat.view(piece.box.sizes).to(piece.dtype)

            take(number, resolve)
            number += 1

        self._optimizer.states.look_at(dict(self._optimizer.parameters()), take_group)
        for number in range(len(self._layouts), len(self._buckets)):
            pieces = self._buckets[number].pieces
            take(number, lambda index, pieces=pieces: _read(pieces[index]))  # type: ignore[misc]


def _read(piece: _Piece) -> Tensor:
    begin, numel = piece.box.start, piece.box.numel
    return piece.parameter.read(begin, begin + numel).view(piece.box.sizes)


def _refuse_extra_state(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise SwapUsageError(
                f"{name or 'the model'} has an extra state, which a checkpoint does not hold",
                fix="keep it in a buffer, or save it by `extra`",
            )


def _refuse_what_is_no_data(extra: Any) -> None:
    """Here, and not when half of the checkpoint is written. What would run code when it is read is
    none."""
    written = io.BytesIO()
    try:
        torch.save(extra, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        raise SwapUsageError(
            "extra can't be saved", cause=f"{type(error).__name__}: {error}",
            fix="give state_dicts, tensors, numbers and texts",
        ) from error


def _groups(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    return [
        {**group, "params": [optimizer.key_of(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
