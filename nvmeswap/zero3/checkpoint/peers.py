"""What the ranks of a save or load do together: nobody goes on, or waits, alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from nvmeswap.errors import SwapPeerError

_T = TypeVar("_T")


# How long a rank may take longer than another. (One that dies is noticed at once.)
_TIMEOUT = timedelta(hours=6)
_groups: weakref.WeakKeyDictionary[nn.Module, dict[bool, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Peers:
    """All ranks of a model, with a process group of their own on the CPU: NCCL's would give up
    after minutes of a slow save, and what goes on `behind` training must not meet its messages.

    All calls are collective. Raises SwapPeerError on the ranks whose own work went well, naming
    those where it did not. Threads: the training loop's; another one for one that is `behind`.
    """

    def __init__(self, model: nn.Module, *, behind: bool = False) -> None:
        groups = _groups.setdefault(model, {})
        if behind not in groups:
            groups[behind] = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        group = self.group = groups[behind]
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
