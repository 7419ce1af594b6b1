"""Clearing away dead runs deletes files: those of a dead run and no others, whatever is planted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvmeswap.store.owner import OwnedFolder

OURS = ("params.swp", "optimizer.swp", "manifest.json", "manifest.partial", "owner.json")


def claim(nvme_path: Path, run: str = "fresh") -> OwnedFolder:
    return OwnedFolder.claim(nvme_path, run=run, rank=0, world_size=1)


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder like a dead run's rank, but not below `nvme_path`."""
    return fill(tmp_path / "outside" / "rank00000")


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in OURS:
        (folder / name).write_text(f"precious {name}")
    return folder


def assert_untouched(folder: Path) -> None:
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: f"precious {name}" for name in OURS
    }


def dead_rank(nvme_path: Path) -> Path:
    """Left by a run that was killed, as far as a file can tell: nobody holds its lock."""
    return fill(nvme_path / "nvmeswap" / "dead" / "rank00000")


def test_dead_folder_goes(nvme_path: Path) -> None:
    """Else the tests below would pass because nothing is cleared at all.  field case K07"""
    rank = dead_rank(nvme_path)
    assert claim(nvme_path).removed == (rank,)
    assert not rank.parent.exists()


@pytest.mark.parametrize("name", ("params.swp", "models"))
def test_link_to_a_folder_in_a_dead_folder_is_not_followed(
    nvme_path: Path, outside: Path, name: str
) -> None:
    """Clearing would empty the folder behind the link."""
    rank = dead_rank(nvme_path)
    (rank / name).unlink(missing_ok=True)
    (rank / name).symlink_to(outside)
    claim(nvme_path)
    assert_untouched(outside)
    assert [path.name for path in rank.iterdir()] == [name]


@pytest.mark.parametrize("planted", ("nvmeswap/dead", "nvmeswap/dead/rank00000"))
def test_link_in_place_of_a_dead_folder_is_not_followed(
    nvme_path: Path, outside: Path, planted: str
) -> None:
    """The same one or two floors up."""
    link = nvme_path / planted
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if "rank" in planted else outside.parent)
    assert claim(nvme_path).removed == ()
    assert link.is_symlink()
    assert_untouched(outside)


def test_link_in_place_of_the_owner_file_makes_no_dead_folder(
    nvme_path: Path, outside: Path
) -> None:
    """Whoever links his own lock file to it would have a living run cleared away."""
    rank = dead_rank(nvme_path)
    (rank / "owner.json").unlink()
    (rank / "owner.json").symlink_to(outside / "owner.json")
    assert claim(nvme_path).removed == ()
    assert (rank / "params.swp").exists()
    assert_untouched(outside)


def test_links_to_files_in_a_dead_folder_cost_no_file_outside(
    nvme_path: Path, outside: Path
) -> None:
    """A hard link is one name of a file of which the other must stay as it is."""
    rank = dead_rank(nvme_path)
    for name in ("params.swp", "manifest.json", "owner.json"):
        (rank / name).unlink()
        os.link(outside / name, rank / name)
    (rank / "linked.swp").symlink_to(outside / "optimizer.swp")
    claim(nvme_path)
    assert_untouched(outside)


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    mounted: list[Path] = []

    def mount(*command: str | Path) -> None:
        done = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"can't mount: {done.stderr.strip()}")
        mounted.append(Path(command[-1]))

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("planted", ("nvmeswap/dead", "nvmeswap/dead/rank00000"))
def test_folder_mounted_in_place_of_a_dead_one_is_not_entered(
    nvme_path: Path, outside: Path, mount: Callable[..., None], planted: str
) -> None:
    """A bind mount shows the same filesystem, so the device number doesn't tell it."""
    point = nvme_path / planted
    point.mkdir(parents=True)
    mount("--bind", outside if "rank" in planted else outside.parent, point)
    assert claim(nvme_path).removed == ()
    assert_untouched(outside)


def test_another_filesystem_mounted_in_place_of_a_dead_folder_is_not_entered(
    nvme_path: Path, mount: Callable[..., None]
) -> None:
    """Somebody's data drive."""
    point = nvme_path / "nvmeswap" / "dead"
    point.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", point)
    rank = fill(point / "rank00000")
    assert claim(nvme_path).removed == ()
    assert_untouched(rank)


def test_release_of_a_folder_exchanged_meanwhile_touches_nothing_in_its_place(
    nvme_path: Path, outside: Path
) -> None:
    """The path is all that a release had to go by."""
    owner = claim(nvme_path)
    owner.folder.rename(nvme_path / "moved")
    owner.folder.symlink_to(outside)
    owner.release()
    assert_untouched(outside)


def test_release_of_a_run_folder_exchanged_meanwhile_touches_nothing_in_its_place(
    nvme_path: Path, outside: Path
) -> None:
    """The same one floor up, by a folder and not a link."""
    owner = claim(nvme_path)
    owner.folder.parent.rename(nvme_path / "moved")
    outside.parent.rename(owner.folder.parent)
    owner.release()
    assert_untouched(owner.folder)


def test_claim_and_release_in_a_folder_full_of_foreign_things_leave_each_of_them(
    nvme_path: Path
) -> None:
    """A user keeps data and notes beside swap files, under names much like ours."""
    # field case K03: right foreign files survive the clean-up
    root = nvme_path / "nvmeswap"
    names = (
        "params.swp", "nvmeswap/params.swp", "nvmeswap/owner.json", "nvmeswap/data/params.swp",
        "nvmeswap/data/rank00000x/owner.json", "nvmeswap/data/rank1/params.swp",
        "nvmeswap/dead/rank00000/params.swp.bak", "nvmeswap/dead/rank00000/my notes.swp",
        "nvmeswap/dead/rank00000/manifest.json.old", "nvmeswap/dead/rank00000/sub/params.swp",
        "nvmeswap/.hidden/rank00000/owner.json", "nvmeswap/fresh/rank00000/notes.txt",
    )
    for name in names:
        (nvme_path / name).parent.mkdir(parents=True, exist_ok=True)
        (nvme_path / name).write_text(name)
    for name in OURS:
        (root / "dead" / "rank00000" / name).write_text("ours")
    claim(nvme_path).release()
    left = {path.relative_to(nvme_path).as_posix() for path in nvme_path.rglob("*")
            if path.is_file()}
    assert left == {*names, "nvmeswap/.lock"}
    assert all((nvme_path / name).read_text() == name for name in names)
