"""DCP's two sides of a save, streamed: what there is (planner), and where it goes (writer).

DCP keeps the tensors of a file in memory until the file is complete, and makes one file a rank. So
each bucket is given to it as a plan of its own.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nvmeswap.errors import SwapSpaceError, SwapWriteError
from nvmeswap.zero3.checkpoint.contents import Resolve, Streamed
from nvmeswap.zero3.checkpoint.folder import sync_folder, written_badly
from nvmeswap.zero3.checkpoint.peers import Peers, peer_error

_T = TypeVar("_T")


def write(contents: Streamed, folder: Path, peers: Peers) -> dict[str, int]:
    """Write everybody's part into a folder that exists; collective. Returns the sizes of the files
    by name, on rank 0.

    Raises on all ranks if anything fails on one: SwapSpaceError, SwapPathError, SwapWriteError,
    SwapReadError there, SwapPeerError on the others.
    """
    writer = _BucketWriter(contents, folder)
    try:
        dcp_save(
            {}, storage_writer=writer, planner=_Planner(contents), process_group=peers.group
        )
    except CheckpointException as failure:
        error = writer.error
        if error is None:
            own = failure.failures.get(peers.rank)
            error = peer_error(tuple(sorted(failure.failures))) if own is None else own[0]
        if isinstance(error, OSError):
            raise written_badly(error, folder) from error
        if isinstance(error, RuntimeError):  # what torch.save makes of it
            raise SwapWriteError(
                "a checkpoint can't be written", path=folder, cause=str(error),
                intact="the older checkpoints", fix="see the kernel's log, and the free space",
            ) from error
        raise error from None
    return writer.files


class _Planner(DefaultSavePlanner):
    """Lists what `contents` has; values come from the bucket that is in memory."""

    def __init__(self, contents: Streamed) -> None:
        super().__init__()
        self._contents = contents
        self.resolve: Resolve | None = None

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self._contents.small
        self.mappings = self._contents.paths  # type: ignore[assignment]
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *self._contents.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self.resolve is None:
            return super().resolve_data(write_item)
        return self.resolve(write_item.index)


class _BucketWriter(FileSystemWriter):
    """A file for each bucket, synced. What goes wrong stays in `error`: DCP sends errors to rank 0
    by pickle, which ours may not survive."""

    def __init__(self, contents: Streamed, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._contents = contents
        self._folder = folder
        self.error: BaseException | None = None
        self.files: dict[str, int] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: refuse what won't fit before anything is written."""
        return self._noting(lambda: self._prepare(plans))

    def _prepare(self, plans: list[SavePlan]) -> list[SavePlan]:
        wanted_nbytes = sum(_nbytes(item) for plan in plans for item in plan.items)
        free_nbytes = shutil.disk_usage(self._folder).free
        if wanted_nbytes > free_nbytes:
            raise SwapSpaceError(
                "the filesystem is too full for a checkpoint", path=self._folder,
                wanted_nbytes=wanted_nbytes, got_nbytes=free_nbytes,
                intact="the older checkpoints", fix="free space, or keep fewer (keep=...)",
            )
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's items."""
        results = self._noting(lambda: self._write(plan, planner))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assert isinstance(planner, _Planner)
        bucket_of = self._contents.bucket_of()
        small: list[WriteItem] = []
        by_bucket: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            number = bucket_of.get(item.index)
            (small if number is None else by_bucket.setdefault(number, [])).append(item)
        results: list[WriteResult] = []

        def write_file(name: str, items: list[WriteItem]) -> None:
            if items:
                prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{name}_")
                part = replace(plan, items=items, storage_data=prefix)
                written = FileSystemWriter.write_data(self, part, planner).wait()
                _leave_the_page_cache(self._folder / written[0].storage_data.relative_path)
                results.extend(written)

        def take(number: int, resolve: Resolve) -> None:
            planner.resolve = resolve
            write_file(f"{number:05}", by_bucket.get(number, []))

        write_file("small", small)
        self._contents.visit(take)
        sync_folder(self._folder)  # this machine's names, where ranks are on several
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: the table of contents."""
        self._noting(lambda: self._finish(metadata, results))

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        aliases: dict[str, list[str]] = {}
        for alias, owner in self._contents.tied.items():
            aliases.setdefault(owner, []).append(alias)
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[owner]
        everything = [result for rank in results for result in rank]
        for result in everything:
            info = result.storage_data
            end = info.offset + info.length
            self.files[info.relative_path] = max(end, self.files.get(info.relative_path, 0))
        also = [
            replace(result, index=replace(result.index, fqn=alias))
            for result in everything
            for alias in aliases.get(result.index.fqn, ())
        ]
        super().finish(metadata, [everything, also])

    def _noting(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except BaseException as error:
            self.error = error
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _leave_the_page_cache(path: Path) -> None:
    """It is synced, and nobody reads it soon: the memory is others'."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
