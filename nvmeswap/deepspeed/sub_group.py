"""One sub-group of DeepSpeed's optimizer: a flat master, the optimizer's states of it, a gradient.

DeepSpeed holds the tensors and expects them empty while they are away: `master.data` and
`state.data` are put in and taken out here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeswap.deepspeed.buffers import HostBuffer
from nvmeswap.errors import SwapError, SwapUsageError
from nvmeswap.io import Direction
from nvmeswap.store.store import StoreRequest, TensorSpec


class Place(enum.Enum):
    """Where a sub-group's master and states are."""

    AWAY = "in their files alone"
    COMING = "being read ahead"
    BOUND = "in memory, as DeepSpeed's tensors; their files are out of date"
    LEAVING = "being written; memory holds them until that is over"
    KEPT = "in memory, DeepSpeed's tensors being empty; their files may be out of date"


def file_name_of(key: str) -> str:
    """As DeepSpeed names it."""
    return f"{key}.tensor.swp"


class Content:
    """The bytes of one flat tensor: in memory, in the file of its key, or on the way.

    `memory` is None while only the file has them; `buffer` is what `memory` is a view of, None if
    that is torch's own. `is_stored`: the file has them. `failure`: of what was last under way,
    until somebody was told. `digest`: of what was last written there.
    """

    def __init__(self, key: str, numel: int, dtype: torch.dtype) -> None:
        self.key = key
        self.numel = numel
        self.dtype = dtype
        self.memory: torch.Tensor | None = None
        self.buffer: HostBuffer | None = None
        self.request: StoreRequest | None = None
        self.is_stored = False
        self.failure: SwapError | None = None
        self.digest: int | None = None

    @property
    def file_name(self) -> str:
        return file_name_of(self.key)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, (self.numel,), (1,))

    def take_memory(self, buffer: HostBuffer) -> torch.Tensor:
        """From now on it lies in `buffer`, content undefined. Returns its memory."""
        self.buffer = buffer
        self.memory = buffer.view(self.dtype, self.numel)
        return self.memory

    def move_to(self, buffer: HostBuffer) -> None:
        """The same bytes, in `buffer`."""
        assert self.memory is not None and self.buffer is None
        before = self.memory
        self.take_memory(buffer).copy_(before)

    def leave_memory(self) -> HostBuffer | None:
        """Forgets its memory; returns the buffer to give back."""
        assert self.request is None
        buffer, self.buffer, self.memory = self.buffer, None, None
        return buffer

    def finish(self) -> None:
        """Waits for what is under way; notes whether it failed. Raises SwapTimeoutError."""
        if self.request is None:
            return
        failures = self.request.failed()
        if failures:
            self.failure = failures[0]
        elif self.request.direction is Direction.WRITE:
            self.digest = self.request.compute_digests()[0]
            self.is_stored = True
        self.request = None


class TensorContent(Content):
    """That of a tensor of DeepSpeed's, which is empty unless bound."""

    def __init__(self, key: str, numel: int, tensor: torch.Tensor) -> None:
        super().__init__(key, numel, tensor.dtype)
        self.serve(tensor)

    def serve(self, tensor: torch.Tensor) -> None:
        """`tensor` is what shows it from now on."""
        self.tensor = tensor
        tensor.ds_id = self.key  # type: ignore[attr-defined]

    def bind(self) -> None:
        assert self.memory is not None
        self.tensor.data = self.memory

    def unbind(self) -> None:
        self.tensor.data = torch.empty(0, dtype=self.dtype, device="cpu")

    def collect(self) -> None:
        """The tensor's bytes count, wherever they are; the file's are out of date. Raises
        SwapUsageError if it has another number of elements by now."""
        data = self.tensor.data
        if data.numel() != self.numel:
            raise SwapUsageError(
                f'"{self.key}" has {data.numel():_} elements now, not {self.numel:_}',
                fix="leave the size of swapped tensors alone while they are in memory",
            )
        if self.memory is None:
            self.memory = data.to("cpu", self.dtype).contiguous().view(-1)
            self.bind()
        elif data.data_ptr() != self.memory.data_ptr():
            self.memory.copy_(data.view(-1))
            self.bind()
        self.is_stored = False


class Gradient(Content):
    """The gradient of a sub-group, filled in by pieces."""

    def __init__(self, group_id: str, numel: int, dtype: torch.dtype) -> None:
        # DeepSpeed's checkpoint leaves out files with this word in their names.
        super().__init__(f"{group_id}_gradient", numel, dtype)
        self._covered: list[tuple[int, int]] = []
        self.has_pieces = False  # else it is nothing but the zeros that stand for none

    def put(self, offset: int, piece: torch.Tensor) -> None:
        """Copies `piece`, of any device and dtype. Raises SwapUsageError if it lies outside."""
        assert self.memory is not None
        end = offset + piece.numel()
        if offset < 0 or end > self.numel:
            raise SwapUsageError(
                f'"{self.key}": elements {offset:_} to {end:_} lie outside its {self.numel:_}'
            )
        target = self.memory[offset:end]
        if target.data_ptr() != piece.data_ptr():
            target.copy_(piece.detach().reshape(-1))
        self.is_stored = False
        self._covered.append((offset, end))
        self.has_pieces = True

    def zero_gaps(self) -> None:
        """What no piece came for is zero: memory has anything there."""
        assert self.memory is not None
        reached = 0
        for begin, end in [*sorted(self._covered), (self.numel, self.numel)]:
            if begin > reached:
                self.memory[reached:begin].zero_()
                self.is_stored = False
            reached = max(reached, end)
        self._covered = [(0, self.numel)]


class SubGroup:
    """What belongs together: all of it is in memory for a step, or none."""

    def __init__(self, parameter: torch.Tensor, numel: int) -> None:
        self.parameter = parameter
        self.id: str = parameter.ds_id  # type: ignore[attr-defined]
        self.numel = numel
        self.master = TensorContent(self.id, numel, parameter)
        self.states: dict[str, TensorContent] = {}
        self.gradient: Gradient | None = None
        self.place = Place.KEPT

    @property
    def contents(self) -> list[TensorContent]:
        """Master and states."""
        return [self.master, *self.states.values()]

    @property
    def unstored(self) -> list[TensorContent]:
        """What memory has and the files have not."""
        return [each for each in self.contents if each.memory is not None and not each.is_stored]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents)

    def find_states(
        self, values: Mapping[str, Any], is_swappable: Callable[[torch.Tensor], bool]
    ) -> list[TensorContent]:
        """Looks for states that the optimizer has made or exchanged since. Returns the contents
        that they replace, whose memory is to be given back."""
        replaced: list[TensorContent] = []
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            known = self.states.get(name)
            if known is not None and known.tensor is value:
                continue
            if value.numel() == self.numel and is_swappable(value):
                if known is not None:
                    replaced.append(known)
                self.states[name] = made = TensorContent(f"{name}-{self.id}", self.numel, value)
                made.collect()
                if self.place is not Place.BOUND:
                    made.unbind()
            elif known is not None and value.numel() == 0:
                known.serve(value)  # a copy of the empty one, by way of a state_dict
                if self.place is Place.BOUND:
                    known.bind()
        return replaced

    def bind(self) -> None:
        """All is in memory, and now DeepSpeed's."""
        for content in self.contents:
            content.bind()
        self.place = Place.BOUND

    def unbind(self) -> None:
        self.parameter.grad = None
        for content in self.contents:
            content.unbind()

    def collect(self) -> None:
        """Before it is written: as `TensorContent.collect`, of each."""
        for content in self.contents:
            content.collect()
