"""What the ranks of a save or load do together: nobody goes on, or waits, alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nvmeswap.errors import SwapPeerError

_T = TypeVar("_T")


class Peers:
    """The ranks of a process group (None: all). Its calls are collective. Raises SwapPeerError on
    the ranks whose own work went well, naming those where it did not."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank."""
        everybodys: list[Any] = [None] * self.world_size
        dist.all_gather_object(everybodys, mine, group=self.group)
        return everybodys

    def together(self, work: Callable[[], _T]) -> _T:
        """This rank's `work`, on all ranks or on none: what it raises on one is told to all."""
        result, error = _try(work)
        failed = tuple(rank for rank, bad in enumerate(self.gather(error is not None)) if bad)
        return _result(result, error, failed)

    def from_rank_0(self, work: Callable[[], _T]) -> _T:
        """Rank 0's `work`, for all; it is not called on the others."""
        told: list[Any] = [None, False]
        error = None
        if self.rank == 0:
            told[0], error = _try(work)
            told[1] = error is not None
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        result: _T = told[0]
        return _result(result, error, (0,) if told[1] else ())


def peer_error(ranks: tuple[int, ...]) -> SwapPeerError:
    """For a rank that has nothing wrong itself."""
    return SwapPeerError(
        "another rank could not do its part of a checkpoint", ranks=ranks, fix="see its error"
    )


def _try(work: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # Ctrl-C, too: the others must learn of it
        return None, error


def _result(result: _T | None, error: BaseException | None, failed: tuple[int, ...]) -> _T:
    if error is not None:
        raise error
    if failed:
        raise peer_error(failed)
    return result  # type: ignore[return-value]
