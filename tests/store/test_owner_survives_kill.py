"""Folders of dead owners go, those of live ones and foreign files stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.errors import SwapConfigError, SwapOwnerError, SwapPathError
from nvmeswap.store.owner import OwnedFolder


def claim(nvme_path: Path, run: str = "run", rank: int = 0) -> OwnedFolder:
    return OwnedFolder.claim(nvme_path, run=run, rank=rank, world_size=8)


class Child:
    """A forked process that does something, says so, and then waits to be told to end."""

    def __init__(self, body: Callable[[], object]) -> None:
        said, say = os.pipe()
        hear, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(said)
            os.close(self._tell)
            try:
                kept = body()  # noqa: F841  dropping an owner would release it
                os.write(say, b"done")
                os.read(hear, 1)
            finally:
                os._exit(0)
        os.close(say)
        os.close(hear)
        self.said = os.read(said, 4)
        os.close(said)

    def end(self, kill: bool = False) -> None:
        if kill:
            os.kill(self.pid, 9)
        os.close(self._tell)
        os.waitpid(self.pid, 0)


def test_start_when_an_owner_was_killed_removes_its_folder_and_keeps_live_ones(
    tmp_path: Path
) -> None:
    """Killed runs leave their folders for ever, until the drive is full; or the cleaning takes a
    running job's files away."""
    # field cases K07, K08

    def own(run: str, rank: int) -> OwnedFolder:
        owner = claim(tmp_path, run, rank)
        (owner.folder / "params.swp").write_bytes(bytes(4096))
        (owner.folder / "manifest.json").write_text("{}")
        return owner

    dead = Child(lambda: own("dead", 0))
    live = Child(lambda: own("live", 1))
    mine = own("mine", 2)
    assert dead.said == live.said == b"done"
    dead.end(kill=True)
    fresh = claim(tmp_path, "fresh", 3)
    root = tmp_path / "nvmeswap"
    assert fresh.removed == (root / "dead" / "rank00000",)
    assert not (root / "dead").exists()
    assert (root / "live" / "rank00001" / "params.swp").exists()
    assert (mine.folder / "params.swp").exists()
    live.end()


def test_start_when_the_same_run_and_rank_was_killed_begins_empty(tmp_path: Path) -> None:
    """A restarted job that finds its old files trains on the old values."""
    # field case K05: right an empty folder, wrong the earlier weights

    def own() -> OwnedFolder:
        owner = claim(tmp_path)
        (owner.folder / "params.swp").write_bytes(bytes(4096))
        return owner

    child = Child(own)
    child.end(kill=True)
    owner = claim(tmp_path)
    assert owner.removed == (owner.folder,)
    assert [path.name for path in owner.folder.iterdir()] == ["owner.json"]


def test_start_when_run_and_rank_are_in_use_is_refused(tmp_path: Path) -> None:
    """Two jobs in one folder truncate each other's files."""
    # field case K02
    child = Child(lambda: claim(tmp_path))
    with pytest.raises(SwapOwnerError) as caught:
        claim(tmp_path)
    assert str(child.pid) in str(caught.value)
    child.end(kill=True)
    mine = claim(tmp_path)
    with pytest.raises(SwapOwnerError):
        claim(tmp_path)  # in the same process too
    assert (mine.folder / "owner.json").exists()


def test_owner_file_says_who_owns_it(tmp_path: Path) -> None:
    """Somebody who finds a full drive wants to know whose it is."""
    owner = claim(tmp_path, "run", 5)
    facts = json.loads((owner.folder / "owner.json").read_text())
    assert owner.folder == tmp_path / "nvmeswap" / "run" / "rank00005"
    assert facts["pid"] == os.getpid()
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (facts["run"], facts["rank"], facts["world_size"]) == ("run", 5, 8)
    assert facts["start_time_s"] > 0


def test_foreign_files_survive_claim_and_release(tmp_path: Path) -> None:
    """A user's notes, or another program's data, beside the swap files must never go."""
    # field case K03
    root = tmp_path / "nvmeswap"
    foreign = [root / "notes.txt", root / "run" / "rank00000" / "params.swp.bak",
               root / "other" / "params.swp", root / "run" / "rank1" / "params.swp",
               root / "run" / "rank00007" / "params.swp"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    (root / "linked").symlink_to(root / "other")
    owner = claim(tmp_path)
    (owner.folder / "params.swp").write_text("ours")
    (owner.folder / "folder.swp").mkdir()
    owner.release()
    assert [path.read_text() for path in foreign] == ["precious"] * len(foreign)
    assert not (owner.folder / "params.swp").exists()
    assert not (owner.folder / "owner.json").exists()
    assert (owner.folder / "folder.swp").is_dir()


def test_release_removes_the_folder_once_and_lets_others_in(tmp_path: Path) -> None:
    """Swap files that stay after a clean end fill the drive run by run."""
    owner = claim(tmp_path)
    neighbour = claim(tmp_path, rank=1)
    owner.release()
    owner.release()
    assert not owner.folder.exists() and neighbour.folder.exists()
    again = claim(tmp_path)
    owner.release()  # the folder is another's now
    assert again.folder.exists()
    again.release()
    neighbour.release()
    assert not (tmp_path / "nvmeswap" / "run").exists()


def test_release_without_removal_keeps_files_until_the_next_start(tmp_path: Path) -> None:
    """Somebody who looks into a failure needs the files that led to it."""
    owner = claim(tmp_path)
    (owner.folder / "params.swp").write_text("kept")
    owner.release(remove=False)
    assert (owner.folder / "params.swp").read_text() == "kept"
    assert claim(tmp_path, rank=1).removed == (owner.folder,)


def test_folder_when_the_process_exits_normally_is_removed(tmp_path: Path) -> None:
    """A script that ends without closing would leave its files until the next start."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from nvmeswap.store.owner import OwnedFolder\n"
        "owner = OwnedFolder.claim(Path(sys.argv[1]), run='r', rank=0, world_size=1)\n"
        "(owner.folder / 'params.swp').write_text('x')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    assert [path.name for path in (tmp_path / "nvmeswap").iterdir()] == [".lock"]


def test_forked_child_when_it_ends_leaves_the_folder_and_the_lock_to_the_parent(
    tmp_path: Path
) -> None:
    """A DataLoader worker that exits would delete the swap files of its training."""
    owner = claim(tmp_path)

    Child(owner.release).end()
    assert (owner.folder / "owner.json").exists()
    with pytest.raises(SwapOwnerError):
        claim(tmp_path)


def test_forked_child_when_it_outlives_its_parent_does_not_keep_the_folder_alive(
    tmp_path: Path
) -> None:
    """An orphaned DataLoader worker would pin a dead run's terabytes."""
    # field case K07
    wait_here, let_go = os.pipe()

    def own_and_fork() -> OwnedFolder:
        owner = claim(tmp_path)
        born, tell_born = os.pipe()
        if os.fork() == 0:
            os.close(let_go)
            os.write(tell_born, b"1")
            os.read(wait_here, 1)  # lives until the test closes its end
            os._exit(0)
        os.read(born, 1)
        return owner

    child = Child(own_and_fork)
    child.end(kill=True)
    owner = claim(tmp_path)
    assert owner.removed == (owner.folder,)
    os.close(let_go)
    os.close(wait_here)


@pytest.mark.parametrize("what", ["missing", "a file", "read-only"])
def test_path_when_unusable_says_which_way(
    tmp_path: Path, what: str, mount_tmpfs: Callable[[str], Path]
) -> None:
    """ "No such file" for a folder that is there sends the user looking in the wrong place."""
    if what == "missing":
        path = tmp_path / "nowhere"
    elif what == "a file":
        path = tmp_path / "file"
        path.write_text("")
    else:
        path = mount_tmpfs("tmpfs -o ro,size=1m")
    with pytest.raises(SwapPathError) as caught:
        claim(path)
    assert caught.value.path == path and caught.value.fix
    assert {"missing": "does not exist", "a file": "not a folder", "read-only": "writ"}[what] in (
        caught.value.what
    )


@pytest.mark.parametrize("run", ["", "..", "a/b", ".hidden", "a" * 129, "a\n"])
def test_run_name_when_it_cannot_name_a_folder_is_refused(tmp_path: Path, run: str) -> None:
    """A run called "../x" would write, and remove, outside its place."""
    with pytest.raises(SwapConfigError) as caught:
        claim(tmp_path, run)
    assert caught.value.key == "run"


@settings(max_examples=25, deadline=None)
@given(st.sets(st.tuples(st.sampled_from(["a", "a1", "1", "rank00001"]), st.integers(0, 3000)),
               min_size=2, max_size=6))
def test_names_are_one_to_one(tmp_path_factory: pytest.TempPathFactory,
                              owners: set[tuple[str, int]]) -> None:
    """Rank 1 with id 2345 and rank 12 with id 345 in one file."""
    # field case K03
    nvme_path = tmp_path_factory.mktemp("names")
    claimed = [claim(nvme_path, run, rank) for run, rank in owners]
    assert len({owner.folder for owner in claimed}) == len(owners)
    for owner in claimed:
        owner.release()


def test_many_ranks_when_they_start_and_end_at_once_all_get_their_folder(tmp_path: Path) -> None:
    """A rank that sees its neighbour's half-made folder takes it for a dead one."""
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            for _ in range(8):
                owner = claim(tmp_path, rank=rank)
                assert owner.removed == ()
                (owner.folder / "params.swp").write_text("x")
                owner.release()
                assert not owner.folder.exists()
        except BaseException as failure:
            failures.append(failure)

    def live_in_threads(first_rank: int) -> None:
        threads = [threading.Thread(target=live, args=(first_rank + i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    children = []
    for first_rank in (0, 2):
        pid = os.fork()
        if pid == 0:
            try:
                live_in_threads(first_rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
