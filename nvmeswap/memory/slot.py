"""A lent piece of the arena: who holds it, and which event frees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nvmeswap.memory.pool import Pool


@dataclass(frozen=True, slots=True)
class SlotClass:
    """`count` slots of `nbytes` each; `nbytes` is a multiple of 4096."""

    nbytes: int
    count: int


class Slot:
    """One loan of a pool: `memory` (uint8, `nbytes` long, 4096-aligned) until it is released.

    Content at the start of a loan is undefined. Released exactly once, by `release` or by
    `release_after`, from any thread; neither blocks. After that the memory is somebody else's, so
    keep no view of it. A slot that is dropped without release stays lent.
    """

    __slots__ = ("_lender", "holder", "memory", "nbytes")

    def __init__(self, memory: torch.Tensor, *, holder: str, lender: Pool) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.holder = holder
        self._lender = lender

    def release(self) -> None:
        """Gives the memory back at once: nothing reads or writes it any more."""
        self._lender.take_back(self)

    def release_after(self, event: torch.cuda.Event) -> None:
        """Gives the memory back once `event` (recorded after the last GPU copy that touches the
        memory) has happened."""
        self._lender.take_back_after(self, event)
