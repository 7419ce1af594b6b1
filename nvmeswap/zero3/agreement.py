"""Errors that all ranks must learn of together.

A rank that raised alone would leave the others waiting in their next collective. So with more than
one rank a failed read in forward or backward is kept, the pass goes on with NaN, and all ranks
raise when `step()` begins, before any parameter was updated. They compare notes again when `step()`
ends: what failed in it on one rank is raised on all, and all can call `step()` again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from nvmeswap.errors import SwapError, SwapPeerError, SwapUsageError


class Agreement:
    """Keeps this rank's first error until the ranks compare notes.

    Threads: `report` from any, `raise_if_any_rank_failed` from the training loop's, on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.device = device
        self._world_size = dist.get_world_size(group)
        self._error: SwapError | None = None
        self._is_final = False
        self.was_final = False  # what was raised last: no other call can finish what it broke

    @property
    def alone(self) -> bool:
        """True with one rank, where errors are raised where they happen."""
        return self._world_size == 1

    def report(self, error: SwapError, *, is_final: bool = False) -> None:
        """Keep an error for the next boundary; the first one wins. `is_final`: the state that it
        left is of no use."""
        self._is_final |= is_final
        if self._error is None:
            self._error = error

    def is_same_on_all(self, number: int, group: dist.ProcessGroup | None) -> bool:
        """One small all-gather over `group`."""
        mine = torch.tensor([number], dtype=torch.int64, device=self.device)
        all_numbers = mine.new_empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(all_numbers, mine, group=group)
        return bool((all_numbers == number).all())

    def raise_if_any_rank_failed(self, *, fix: str) -> None:
        """One small all-gather; raises this rank's own error, or SwapPeerError naming the ranks
        that failed, with the `fix` that goes for all."""
        error, self._error = self._error, None
        is_final, self._is_final = self._is_final, False
        if self.alone:
            self.was_final = is_final
            if error is not None:
                raise error
            return
        mine = torch.tensor(
            [2 if is_final else error is not None], dtype=torch.uint8, device=self.device
        )
        all_flags = torch.empty(self._world_size, dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(all_flags, mine, group=self._group)
        self.was_final = bool((all_flags == 2).any())
        if error is not None:
            raise error
        failed = tuple(all_flags.nonzero().flatten().tolist())
        if failed:
            raise SwapPeerError(
                "another rank could not go on", ranks=failed, fix=f"see its error; {fix}"
            )


class GatherOrder:
    """Which parameters were gathered since the last step, and in which order.

    Ranks that gather different parameters at the same time (each runs another expert, each expert
    being a group of FSDP2's of its own) get parts of each, if they are of one size, and nobody
    tells them. So each rank keeps a checksum of its order, and they are compared in `step()`.
    """

    def __init__(self, agreement: Agreement, groups: Iterable[dist.ProcessGroup]) -> None:
        self._agreement = agreement
        self._checksums = {group: 0 for group in groups if group.size() > 1}

    def note(self, key: str, group: dist.ProcessGroup) -> None:
        """`key` is about to be gathered over `group`."""
        if group in self._checksums:
            self._checksums[group] = zlib.crc32(key.encode(), self._checksums[group])

    def report_differences(self) -> None:
        """To the agreement; on all ranks. From here on the next step is noted."""
        for group, checksum in self._checksums.items():
            self._checksums[group] = 0
            if not self._agreement.is_same_on_all(checksum, group):
                self._agreement.report(
                    SwapUsageError(
                        "not all ranks gathered the same parameters in the same order since the "
                        "last step: they computed with mixed ones",
                        fix="choose modules that fully_shard was applied to (experts, branches) "
                        "alike on all ranks, or shard them together with the module around them "
                        "and call set_reduce_scatter_unused_params(True) on it",
                    )
                )
