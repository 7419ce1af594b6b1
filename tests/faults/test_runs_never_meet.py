"""Runs beside and after one another in one folder: each has its own files and finds no others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.errors import SwapManifestError, SwapSpaceError, SwapUsageError
from nvmeswap.io.engine import Engine, Lane
from nvmeswap.io.probe import probe_folder
from nvmeswap.store.manifest import Manifest, TensorSpec
from nvmeswap.store.store import Store
from tests.store.test_owner_survives_kill import Child

pytestmark = pytest.mark.filterwarnings("ignore::nvmeswap.io.FilesystemWarning")
MiB = 1 << 20
SPEC = TensorSpec(torch.uint8, (5000,), (1,))


@pytest.fixture(autouse=True)
def no_threads_of_torch() -> Iterator[None]:
    """They don't survive a fork: a child would wait for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def open_store(nvme_path: Path, *, rank: int = 0, world_size: int = 1) -> Store:
    """Of the one run "run", as when its name is given by a job's script."""
    engine = Engine(backend="posix")
    return Store(nvme_path, run="run", rank=rank, world_size=world_size, engine=engine,
                 probe=probe_folder(nvme_path, backend="posix"))


def write(store: Store, value: int) -> None:
    store.create_file("params.swp", {"weight": SPEC})
    source = torch.full(SPEC.shape, value, dtype=torch.uint8)
    store.write("weight", source, lane=Lane.WRITEBACK).wait()


def read(store: Store) -> torch.Tensor:
    memory = torch.full(SPEC.shape, 0xAA, dtype=torch.uint8)
    store.read("weight", memory, lane=Lane.DEMAND).wait()
    return memory


def swapper_with(nvme_path: Path, value: int, key: str = "weight") -> TensorSwapper:
    swapper = TensorSwapper(nvme_path)
    swapper.swap_out(key, torch.full((5000,), value))
    return swapper


def test_swappers_of_processes_that_know_nothing_of_each_other_keep_their_own_data(
    tmp_path: Path,
) -> None:
    """Without a rank in the environment both take themselves for the first.  field case K02"""

    def swap() -> TensorSwapper:
        swapper = swapper_with(tmp_path, os.getpid())
        for step in range(20):
            assert torch.equal(swapper.swap_in("weight"), torch.full((5000,), os.getpid() + step))
            swapper.swap_out("weight", torch.full((5000,), os.getpid() + step + 1))
        return swapper

    children = [Child(swap) for _ in range(2)]
    assert [child.said for child in children] == [b"done"] * 2
    assert len(list(tmp_path.rglob("tensors.swp"))) == 2
    mine = swap()
    for child in reversed(children):  # the later one holds the earlier one's pipe
        child.end()
    assert torch.equal(mine.swap_in("weight"), torch.full((5000,), os.getpid() + 20))
    mine.close()


def test_names_of_a_thousand_groups_made_and_freed_never_meet(tmp_path: Path) -> None:
    """A name made from id(object) is used again once the object is gone.  field case K04"""
    with TensorSwapper(tmp_path) as swapper:
        for number in range(1000):
            group = {f"{number}.{part}": torch.full((7,), number + part) for part in range(2)}
            swapper.swap_out_many(group)
            del group
            if number >= 5:
                for part in range(2):
                    key = f"{number - 5}.{part}"
                    assert torch.equal(swapper.swap_in(key), torch.full((7,), number - 5 + part))
                    swapper.discard(key)
        assert len(swapper.keys()) == 10
        names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert names - {"manifest.json"} == {".lock", "owner.json", "tensors.swp"}


@pytest.mark.parametrize("ends", ("is killed", "keeps its files"))
def test_later_run_of_the_same_name_never_sees_the_earlier_weights(
    tmp_path: Path, ends: str
) -> None:
    """Files of the right size are taken over, and the next job trains on them.  field case K05"""

    def first() -> Store:
        store = open_store(tmp_path)
        write(store, 1)
        if ends == "keeps its files":
            store.close(remove=False)
        return store

    child = Child(first)
    assert child.said == b"done"
    assert len(list(tmp_path.rglob("params.swp"))) == 1
    child.end(kill=True)
    second = open_store(tmp_path)
    with pytest.raises(SwapUsageError):
        second.spec("weight")
    second.create_file("params.swp", {"weight": SPEC})
    with pytest.raises(SwapUsageError):
        read(second)
    second.write("weight", torch.full(SPEC.shape, 2, dtype=torch.uint8), lane=Lane.DEMAND).wait()
    assert bool((read(second) == 2).all())
    second.close()


@pytest.mark.parametrize(("before", "after"), ((2, 4), (4, 2), (2, 1)))
def test_run_at_another_world_size_finds_no_shard_of_the_old_one(
    tmp_path: Path, before: int, after: int
) -> None:
    """Shards of equal size hold other elements then.  field cases A04, K06"""

    def old_rank(rank: int) -> Callable[[], Store]:
        def run() -> Store:
            store = open_store(tmp_path, rank=rank, world_size=before)
            write(store, rank + 1)
            return store

        return run

    children = [Child(old_rank(rank)) for rank in range(before)]
    for child in children:
        child.end(kill=True)
    stale = tmp_path / "stale.json"
    shutil.copy(next(tmp_path.rglob("manifest.json")), stale)
    stores = [open_store(tmp_path, rank=rank, world_size=after) for rank in range(after)]
    for store in stores:
        with pytest.raises(SwapUsageError):
            store.spec("weight")
        write(store, 100)
    assert len(list(tmp_path.rglob("params.swp"))) == after  # the others' are gone
    assert all(bool((read(store) == 100).all()) for store in stores)
    with pytest.raises(SwapManifestError) as raised:
        Manifest.load(stale).check_header(run="run", rank=0, world_size=after)
    assert raised.value.field == "world_size"
    for store in stores:
        store.close()


def test_start_after_kill_9_clears_the_dead_swapper_and_spares_the_living(tmp_path: Path) -> None:
    """Killed runs fill the drive for ever, or cleaning takes a running job's files away.

    field cases K07, K08
    """
    dead, living = (Child(lambda: swapper_with(tmp_path, 1)) for _ in range(2))
    assert dead.said == living.said == b"done"
    dead.end(kill=True)
    assert len(list(tmp_path.rglob("tensors.swp"))) == 2
    mine = swapper_with(tmp_path, 3)
    left = {path.parts[-3] for path in tmp_path.rglob("tensors.swp")}
    assert len(left) == 2
    assert any(f"-{living.pid}-" in run for run in left)
    assert not any(f"-{dead.pid}-" in run for run in left)
    living.end()
    mine.close()


def test_probe_removes_what_a_killed_prober_left_and_spares_the_living(tmp_path: Path) -> None:
    """Trial files are small, but for ever.  field case K07"""
    trial = ".nvmeswap-probe-"

    def stop_within() -> None:
        real_preadv = os.preadv
        os.preadv = lambda *_: os.kill(os.getpid(), 19)  # type: ignore[assignment]  # SIGSTOP
        try:
            probe_folder(tmp_path)
        finally:
            os.preadv = real_preadv

    def start() -> int:
        pid = os.fork()
        if pid == 0:
            try:
                stop_within()
            finally:
                os._exit(0)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        return pid

    def end(pid: int) -> None:
        os.kill(pid, 9)
        os.waitpid(pid, 0)

    killed = start()
    (killed_trial,) = tmp_path.glob(f"{trial}*")
    end(killed)
    living = start()
    (living_trial,) = tmp_path.glob(f"{trial}*")
    assert living_trial != killed_trial
    (tmp_path / f"{trial}link").symlink_to(tmp_path / "foreign")
    (tmp_path / "foreign").write_text("precious")
    probe_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        living_trial.name, f"{trial}link", "foreign"
    }
    end(living)
    probe_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{trial}link", "foreign"}
    assert (tmp_path / "foreign").read_text() == "precious"


def test_start_where_a_file_names_a_dead_process_succeeds(tmp_path: Path) -> None:
    """A stale file must not keep the job from restarting, whatever its pid is now.

    field case K08: the pid is that of a process that lives, and of none
    """
    for run, pid in (("a", os.getpid()), ("b", 1 << 22)):
        folder = tmp_path / "nvmeswap" / run / "rank00000"
        folder.mkdir(parents=True)
        (folder / "owner.json").write_text(f'{{"pid": {pid}}}')
        (folder / "params.swp").write_bytes(bytes(4096))
    swapper_with(tmp_path, 1).close()
    assert [path.name for path in (tmp_path / "nvmeswap").iterdir()] == [".lock"]


def test_start_counts_dead_runs_out_before_it_takes_its_space(
    mount_tmpfs: Callable[[str], Path]
) -> None:
    """Files of earlier runs are not counted, and the drive runs over.

    field case K09: there is no limit in bytes to set; what stands in its place is that dead runs'
    files go first, all space is taken at the start, and what doesn't fit is refused then
    """
    folder = mount_tmpfs("tmpfs -o size=8m")

    def store_of(nbytes: int) -> Store:
        store = open_store(folder)
        store.create_file("params.swp", {"weight": TensorSpec(torch.uint8, (nbytes,), (1,))})
        return store

    dead = Child(lambda: store_of(5 * MiB))
    assert dead.said == b"done"
    assert shutil.disk_usage(folder).used >= 5 * MiB
    dead.end(kill=True)
    store = store_of(6 * MiB)  # beside the dead one's there would not be room
    with pytest.raises(SwapSpaceError) as raised:
        store.create_file("optimizer.swp", {"state": TensorSpec(torch.uint8, (4 * MiB,), (1,))})
    assert raised.value.wanted_nbytes == 4 * MiB
    assert 6 * MiB <= shutil.disk_usage(folder).used < 7 * MiB
    store.close()
    assert shutil.disk_usage(folder).used < MiB
