"""A full disk is an error before training, with numbers and nothing left behind."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.errors import SwapPathError, SwapSpaceError, SwapWriteError
from nvmeswap.io.engine import Engine, Lane
from nvmeswap.io.probe import probe_folder
from nvmeswap.store.manifest import TensorSpec
from nvmeswap.store.store import Store

MIB = 1 << 20


def flat(nbytes: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (nbytes,), (1,))


def test_file_when_larger_than_the_free_space_is_refused_with_nothing_left(
    workshop: Any, mount_tmpfs: Callable[[str], Path]
) -> None:
    """A full disk in step 400 loses the run; files cut short are found when they are read."""
    # field case K01: right SwapSpaceError at start, wrong files of 3268 of 3816 MiB
    folder = mount_tmpfs("tmpfs -o size=8m")
    store = workshop.store(folder)
    free_nbytes = shutil.disk_usage(folder).free
    with pytest.raises(SwapSpaceError) as caught:
        store.create_file("params.swp", {"a": flat(4 * MIB), "b": flat(5 * MIB)})
    assert caught.value.path == store.folder / "params.swp"
    assert caught.value.wanted_nbytes == 9 * MIB
    assert caught.value.got_nbytes == free_nbytes
    assert not (store.folder / "params.swp").exists()
    assert shutil.disk_usage(folder).free == free_nbytes
    store.create_file("params.swp", {"a": flat(4 * MIB)})
    assert store.stats().allocated_nbytes == 4 * MIB


def test_file_when_created_takes_all_its_space(
    workshop: Any, mount_tmpfs: Callable[[str], Path]
) -> None:
    """A sparse file passes the check, and the disk is full when it is written."""
    folder = mount_tmpfs("tmpfs -o size=8m")
    store = workshop.store(folder)
    free_nbytes = shutil.disk_usage(folder).free
    store.create_file("params.swp", {"a": flat(3 * MIB)})
    assert free_nbytes - shutil.disk_usage(folder).free >= 3 * MIB


def test_tensors_allocated_until_the_disk_is_full_stay_good(
    workshop: Any, mount_tmpfs: Callable[[str], Path]
) -> None:
    """The tensor that does not fit must not cost those that do."""
    folder = mount_tmpfs("tmpfs -o size=8m")
    store = workshop.store(folder)
    stored = []
    with pytest.raises(SwapSpaceError):
        for index in range(100):
            store.allocate_many("tensors.swp", {str(index): flat(MIB)})
            memory = torch.full((MIB,), index, dtype=torch.uint8)
            store.write(str(index), memory, lane=Lane.WRITEBACK).wait()
            stored.append(index)
    assert 6 <= len(stored) <= 8
    for index in stored:
        memory = torch.full((MIB,), 255, dtype=torch.uint8)
        store.read(str(index), memory, lane=Lane.DEMAND).wait()
        assert bool((memory == index).all())
    store.free("0")
    store.allocate_many("tensors.swp", {"again": flat(MIB)})


def test_file_when_the_filesystem_cannot_preallocate_works(
    workshop: Any, mount_tmpfs: Callable[[str], Path]
) -> None:
    """Filesystems without fallocate, or without sizes, are slower, not unusable."""
    # field case K10: ramfs has no fallocate, and reports no free space
    store = workshop.store(mount_tmpfs("ramfs"))
    store.create_file("params.swp", {"a": flat(MIB + 3)})
    source = torch.randint(0, 256, (MIB + 3,), dtype=torch.uint8)
    store.write("a", source, lane=Lane.WRITEBACK).wait()
    target = torch.zeros_like(source)
    store.read("a", target, lane=Lane.DEMAND).wait()
    assert torch.equal(target, source)


def test_file_when_the_name_is_taken_is_never_reused(workshop: Any, tmp_path: Path) -> None:
    """A file of the right size by chance holds another run's weights."""
    # field cases K02, K05
    store = workshop.store(tmp_path)
    (store.folder / "params.swp").write_text("another's")
    with pytest.raises(SwapPathError):
        store.create_file("params.swp", {"a": flat(MIB)})
    assert (store.folder / "params.swp").read_text() == "another's"


def test_file_when_over_the_file_size_limit_is_refused_with_nothing_left(tmp_path: Path) -> None:
    """`ulimit -f` cuts writes short in the middle of training."""
    probe = probe_folder(tmp_path)  # here: torch's own threads do not survive the fork
    pid = os.fork()
    if pid == 0:  # a limit once lowered stays
        code = 1
        try:
            store = Store(tmp_path, run="r", rank=0, world_size=1,
                          engine=Engine(backend=probe.backend), probe=probe)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
            try:
                store.create_file("params.swp", {"a": flat(5 * MIB)})
            except SwapWriteError:
                code = 2 if (store.folder / "params.swp").exists() else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_ranks_of_one_run_share_nothing(workshop: Any, tmp_path: Path) -> None:
    """Ranks in one folder truncate each other's files."""
    # field case K02
    stores = [workshop.store(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for rank, store in enumerate(stores):
        store.create_file("params.swp", {"weight": flat(MIB)})
        memory = torch.full((MIB,), rank, dtype=torch.uint8)
        store.write("weight", memory, lane=Lane.WRITEBACK).wait()
    for rank, store in enumerate(stores):
        memory = torch.full((MIB,), 255, dtype=torch.uint8)
        store.read("weight", memory, lane=Lane.DEMAND).wait()
        assert bool((memory == rank).all())
