"""A tensor that is moved through slots: how it is cut into what one slot takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from nvmeswap.errors import SwapUsageError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.engine import Direction
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.swap.layout import flat


@dataclass(eq=False, slots=True)
class Transit:
    """A tensor to be moved: `spec` is what is stored as `name`. `tensor`, any stride, is what is
    written, or filled."""

    key: str
    name: str
    spec: TensorSpec
    tensor: torch.Tensor
    nbytes: int = field(init=False)
    _bytes: torch.Tensor | None = None  # of a dense tensor: `tensor`, or one of its values
    _is_copy: bool = False

    def __post_init__(self) -> None:
        self.nbytes = self.spec.nbytes
        if self.nbytes and not self.tensor.data_ptr():
            raise SwapUsageError(
                f"{self.key} has no memory: its storage was freed, or it is fake",
                fix="give it memory before it is moved",
            )

    def bytes_of(self, direction: Direction) -> torch.Tensor:
        """Its dense elements, flat; on the device, queued on the current stream."""
        if self._bytes is None:
            dense = self.tensor.detach()
            if not _is_stored_like(dense, self.spec):
                self._is_copy = True
                dense = torch.empty_strided(
                    self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device=dense.device
                )
                if direction is Direction.WRITE:
                    dense.copy_(self.tensor.detach())
            if dense.stride() != (1,):
                dense = flat(dense)
            self._bytes = dense.view(torch.uint8)
        return self._bytes

    def complete(self) -> None:
        """All of `bytes_of` has been read: the tensor gets it, queued likewise."""
        if self._is_copy and self._bytes is not None:
            dense = self._bytes.view(self.spec.dtype)
            self.tensor.copy_(torch.as_strided(dense, self.spec.shape, self.spec.stride))


@dataclass(slots=True)
class Piece:
    """What is moved of a tensor at a time: at most a slot. `place` is where in the slot."""

    transit: Transit
    first_byte: int
    nbytes: int
    place: int

    @property
    def is_last(self) -> bool:
        return self.first_byte + self.nbytes == self.transit.nbytes

    def bytes_of(self, direction: Direction) -> torch.Tensor:
        """Its part of the tensor's `bytes_of`."""
        whole = self.transit.bytes_of(direction)
        if self.nbytes == self.transit.nbytes:
            return whole
        return whole[self.first_byte : self.first_byte + self.nbytes]


def packed(
    transits: Iterable[Transit], slot_nbytes: int, alignment_nbytes: int, *, is_split: bool
) -> Iterator[tuple[bool, list[Piece]]]:
    """What goes into one slot after another: many tensors, or a part of one. They lie in it as in
    the file. `is_split`: those whose length is a multiple of the alignment apart, as a GPU's own
    memory wants them; the first value tells which these are. Else it is False."""
    open_slots: dict[bool, list[Piece]] = {False: [], True: []}
    for transit in transits:
        for first_byte in range(0, transit.nbytes, slot_nbytes):
            nbytes = min(slot_nbytes, transit.nbytes - first_byte)
            is_aligned = is_split and nbytes % alignment_nbytes == 0
            piece = Piece(transit, first_byte, nbytes, 0)
            if nbytes < transit.nbytes:
                yield is_aligned, [piece]
                continue
            pieces = open_slots[is_aligned]
            if pieces:
                piece.place = padded_nbytes(pieces[-1].place + pieces[-1].nbytes, alignment_nbytes)
                if piece.place + nbytes > slot_nbytes:
                    yield is_aligned, pieces
                    pieces, piece.place = [], 0
            pieces.append(piece)
            open_slots[is_aligned] = pieces
    yield from ((is_aligned, pieces) for is_aligned, pieces in open_slots.items() if pieces)


def _is_stored_like(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether its own memory is what is stored. (Of dimensions of size 1 the stride means
    nothing.)"""
    if tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.stride() == spec.stride or all(
        size == 1 or ours == stored
        for size, ours, stored in zip(spec.shape, tensor.stride(), spec.stride, strict=True)
    )
