"""`save()`: a model and its optimizer into a folder, whole or not at all."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nvmeswap.errors import SwapUsageError
from nvmeswap.memory.budget import available_host_memory
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.checkpoint.contents import Contents, Streamed
from nvmeswap.zero3.checkpoint.folder import Writing, log
from nvmeswap.zero3.checkpoint.peers import Peers
from nvmeswap.zero3.checkpoint.staged import Staged
from nvmeswap.zero3.checkpoint.writer import write
from nvmeswap.zero3.optimizer import ShardedOptimizer

# Of the memory that is free, what a copy of the state may take.
_MOST_OF_FREE_MEMORY = 0.8


class Saving:
    """A save, under way or over. Errors of one under way are logged, and raised by `wait`, else by
    the next save. `wait` before the process group is destroyed. Threads: the training loop's."""

    def __init__(self, work: Callable[[], Path], *, behind: bool) -> None:
        self._error: BaseException | None = None
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        if behind:
            # Not a daemon: a program that ends finishes what it saves.
            self._thread = threading.Thread(target=self._run, args=(work,), name="nvmeswap-save")
            self._thread.start()
        else:
            self._path = work()

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            self._path = work()
        except BaseException as error:
            self._error = error
            log.error("a save behind training failed: %s", error)

    def done(self) -> bool:
        """True if `wait` would not wait."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """The complete checkpoint's path. Raises what `save` raises; SwapUsageError if that has
        been raised before."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._path is None:
            raise SwapUsageError("this save failed, and its error was raised before")
        return self._path

    def settle(self) -> None:
        """For the next save: wait, and raise an error that nobody has seen."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self.wait()


_under_way: weakref.WeakKeyDictionary[Optimizer, Saving] = weakref.WeakKeyDictionary()


def save(
    model: nn.Module,
    optimizer: Optimizer,
    folder: str | Path,
    *,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Write `folder`/step-00000010, from which `load` resumes with any number of ranks.

        nvmeswap.zero3.save(model, optimizer, "checkpoints", step=10, extra={"scheduler": ...})

    Call it between steps, on all ranks. It has the weights with their exact fp32 values, the
    optimizer's states and options, buffers and `extra`, and is an ordinary
    torch.distributed.checkpoint: other programs read `model.<name>` from it. A sub-group at a time
    is in memory, twice. The checkpoint appears under its name when it is complete and on the drive;
    until then, and whatever happens, the older ones stay as they are. What a killed save left
    behind is removed by the next.

    Args: `folder`, shared by all ranks, made if need be; `step`, of its name (None: the optimizer's
    count of updates, else one more than the last checkpoint's); `extra`, this rank's, anything that
    pickles (scheduler, random state, position in the data); `keep`, how many older checkpoints
    stay (None: all); `asynchronous`, copy to memory and write behind training. Where memory
    doesn't allow it on some rank, it warns and saves before it returns.
    Raises, on all ranks: SwapSpaceError, SwapPathError, SwapWriteError, SwapReadError,
    SwapOwnerError (another job saves there), SwapUsageError (in the middle of a step) on the rank
    where it happened, SwapPeerError on the others. Then nothing is left of it.
    Blocking: until it is complete, or copied. Threads: the training loop's, on all ranks.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise SwapUsageError(
            "this optimizer is not swapped",
            fix="use torch.distributed.checkpoint for a model without offload",
        )
    if step is not None and (type(step) is not int or step < 0):
        raise SwapUsageError(f"{step!r} is not the number of a step", fix="give an int from 0 on")
    fsdp.reshard_all(model)  # an evaluation leaves the root gathered
    peers = Peers(model)
    last = _under_way.pop(optimizer, None)
    peers.together(lambda: None if last is None else last.settle())
    contents = peers.together(lambda: Contents(model, optimizer, extra, peers.rank))
    counts = [count for count in peers.gather(contents.step) if count is not None]
    number = max(counts, default=None) if step is None else step
    described = {
        "format": 1, "optimizer": optimizer.class_name, "world_size": peers.world_size,
        "tied": contents.tied,
    }
    if asynchronous and _may_stage(peers, contents, optimizer.swap.spare_nbytes):
        staged = peers.together(lambda: Staged(contents))
        behind = Peers(model, behind=True)
        saving = Saving(
            lambda: _write(staged, behind, Path(folder), number, keep, described), behind=True
        )
        _under_way[optimizer] = saving
        return saving
    return Saving(
        lambda: _write(contents, peers, Path(folder), number, keep, described), behind=False
    )


def _write(
    contents: Streamed,
    peers: Peers,
    folder: Path,
    step: int | None,
    keep: int | None,
    described: dict[str, Any],
) -> Path:
    """All ranks, start to end."""
    writing: Writing | None = None

    def begin() -> tuple[Path, Path]:
        nonlocal writing
        writing = Writing(folder, step)
        return writing.partial, writing.path

    def complete(files: dict[str, int]) -> None:
        assert writing is not None
        writing.complete(described, files, keep)

    try:
        partial, path = peers.from_rank_0(begin)
        files = write(contents, partial, peers)
        peers.from_rank_0(lambda: complete(files))
    except BaseException:
        if writing is not None:
            writing.abandon()
        raise
    if peers.rank == 0:
        log.info("saved %s", path)
    return path


def _may_stage(peers: Peers, contents: Contents, spare_nbytes: int | None) -> bool:
    """Whether all ranks have memory for a copy, and budget (`spare_nbytes`, None: no budget). Ranks
    of one machine share it, so the sum counts on each."""
    everybodys_nbytes = sum(peers.gather(contents.nbytes))
    room = available_host_memory()
    allowed_nbytes, limit = int(_MOST_OF_FREE_MEMORY * room.available_nbytes), room.limit
    why = ""
    if everybodys_nbytes > allowed_nbytes:
        why = f"{everybodys_nbytes:_} bytes, and {allowed_nbytes:_} are to be had ({limit})"
    elif spare_nbytes is not None and contents.nbytes > spare_nbytes:
        why = f"{contents.nbytes:_} bytes, and the budget leaves {spare_nbytes:_}"
    reasons = [reason for reason in peers.gather(why) if reason]
    if reasons:
        warnings.warn(
            f"a copy of the state takes {reasons[0]}: the checkpoint is written before training "
            "goes on",
            stacklevel=3,
        )
    return not reasons
