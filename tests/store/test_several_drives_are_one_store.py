"""A store over folders on several drives: the same store, and each drive's trouble has its name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapOwnerError, SwapPathError, SwapSpaceError
from nvmeswap.io import Engine, Lane, probe_folder
from nvmeswap.io.file import STRIPE_NBYTES
from nvmeswap.io.probe import FolderProbe
from nvmeswap.store.manifest import Manifest
from nvmeswap.store.owner import OwnedFolder, OwnedFolders
from nvmeswap.store.store import Store, TensorSpec

POISON = 0xA5
MIB = 1 << 20


def probe_of(folders: dict[Path, int]) -> FolderProbe:
    """With these weights, so that tests don't depend on the speed of the machine."""
    probes = [probe_folder(folder) for folder in folders]
    backend = "posix" if len({probe.backend for probe in probes}) > 1 else probes[0].backend
    drives = tuple(
        replace(probe.drives[0], weight=weight)
        for probe, weight in zip(probes, folders.values(), strict=True)
    )
    return replace(probes[0], backend=backend, drives=drives)


def spec_of(nbytes: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (nbytes,), (1,))


MakeStore = Callable[..., Store]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    opened: list[tuple[Store, Engine]] = []

    def make(folders: dict[Path, int]) -> Store:
        probe = probe_of(folders)
        engine = Engine(backend=probe.backend)
        store = Store(next(iter(folders)), run="run", rank=0, world_size=1, engine=engine,
                      probe=probe)
        opened.append((store, engine))
        return store

    yield make
    for store, engine in opened:
        store.close()
        engine.close()


@pytest.fixture
def folders(tmp_path: Path) -> dict[Path, int]:
    made = {tmp_path / name: weight for name, weight in (("a", 3), ("b", 1), ("c", 2))}
    for folder in made:
        folder.mkdir()
    return made


def swap_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.swp"))


def test_tensors_come_back_from_all_drives(
    make_store: MakeStore, folders: dict[Path, int]
) -> None:
    """Else striping loses a stripe."""
    store = make_store(folders)
    sizes = (5, 4097, 3 * MIB - 11, 7 * MIB + 1, 0)
    store.create_file("params.swp", {f"t{i}": spec_of(size) for i, size in enumerate(sizes)})
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    for i, tensor in enumerate(tensors):
        store.write(f"t{i}", tensor, lane=Lane.WRITEBACK).wait()
    for i, tensor in enumerate(tensors):
        copy = torch.full_like(tensor, POISON)
        store.read(f"t{i}", copy, lane=Lane.DEMAND).wait()
        assert torch.equal(copy, tensor)


def test_each_drive_holds_its_share_and_no_more(
    make_store: MakeStore, folders: dict[Path, int]
) -> None:
    """Else the smallest drive decides how much fits."""
    store = make_store(folders)
    store.create_file("params.swp", {"t": spec_of(60 * MIB)})
    for folder, weight in folders.items():
        (path,) = swap_files(folder)
        assert path.stat().st_size == 10 * weight * MIB
        assert path.stat().st_blocks * 512 >= 10 * weight * MIB
    store.allocate_many("tensors.swp", {"small": spec_of(100)})
    store.allocate_many("tensors.swp", {"large": spec_of(70 * MIB)})
    source, copy = torch.ones(70 * MIB, dtype=torch.uint8), torch.zeros(70 * MIB, dtype=torch.uint8)
    store.write("large", source, lane=Lane.WRITEBACK).wait()
    store.read("large", copy, lane=Lane.DEMAND).wait()
    assert torch.equal(copy, source)


def test_closing_removes_what_is_on_every_drive(
    make_store: MakeStore, folders: dict[Path, int]
) -> None:
    """Else the second drive fills up, run after run."""
    store = make_store(folders)
    store.create_file("params.swp", {"t": spec_of(MIB)})
    assert all(len(swap_files(folder)) == 1 for folder in folders)
    store.close()
    for folder in folders:
        assert list((folder / "nvmeswap").iterdir()) == [folder / "nvmeswap" / ".lock"]


def test_manifest_says_how_the_drives_share(
    make_store: MakeStore, folders: dict[Path, int]
) -> None:
    """Else nobody can find a byte on disk, and an old reader takes one drive for the whole."""
    store = make_store(folders)
    store.create_file("params.swp", {"t": spec_of(MIB)})
    path = store.folder / "manifest.json"
    assert json.loads(path.read_text())["format"] == 2
    striping = Manifest.load(path).striping
    assert striping is not None
    assert striping.weights == (3, 1, 2)
    assert striping.stripe_nbytes == STRIPE_NBYTES
    assert [Path(each) for each in striping.folders] == [
        folder / "nvmeswap" / "run" / "rank00000" for folder in folders
    ]
    assert not any(list(folder.rglob("manifest.json")) for folder in list(folders)[1:])


def test_full_drive_is_named_and_no_drive_keeps_anything(
    make_store: MakeStore, tmp_path: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    """Else the error sends people to the wrong drive.  field case K01"""
    small = mount_tmpfs("tmpfs -o size=4m")
    store = make_store({tmp_path: 1, small: 1})
    with pytest.raises(SwapSpaceError) as raised:
        store.create_file("params.swp", {"t": spec_of(16 * MIB)})
    error = raised.value
    assert error.path is not None and error.path.is_relative_to(small)
    assert error.wanted_nbytes == 8 * MIB
    assert error.got_nbytes is not None and error.got_nbytes <= 4 * MIB
    assert swap_files(tmp_path) == []
    # Growing fails in the same way, and leaves the file as it was.
    store.allocate_many("tensors.swp", {"fits": spec_of(2 * MIB)})
    before = [path.stat().st_size for path in swap_files(tmp_path)]
    with pytest.raises(SwapSpaceError):
        store.allocate_many("tensors.swp", {"does not": spec_of(32 * MIB)})
    assert [path.stat().st_size for path in swap_files(tmp_path)] == before


# --- owners --------------------------------------------------------------------------------------


def test_folders_are_claimed_all_or_none(tmp_path: Path) -> None:
    """Else a start that fails on one drive leaves a live-looking folder on the others."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    held = OwnedFolder.claim(second, run="run", rank=0, world_size=1)
    with pytest.raises(SwapOwnerError) as raised:
        OwnedFolders.claim([first, second], run="run", rank=0, world_size=1)
    assert raised.value.path == held.folder
    assert not list(first.rglob("owner.json"))
    held.release()
    with pytest.raises(SwapPathError) as missing:
        OwnedFolders.claim([first, tmp_path / "unmounted"], run="run", rank=0, world_size=1)
    assert missing.value.path == tmp_path / "unmounted"
    assert not list(first.rglob("owner.json"))
    owned = OwnedFolders.claim([first, second], run="run", rank=0, world_size=1)
    assert [each.is_dir() for each in owned.folders] == [True, True]
    owned.release()
    assert not list(tmp_path.rglob("owner.json"))


def test_dead_owners_are_cleared_on_every_drive(tmp_path: Path) -> None:
    """Else a killed run leaves its files on all drives but the first."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        dead = path / "nvmeswap" / "old" / "rank00000"
        dead.mkdir(parents=True)
        (dead / "owner.json").touch()
        (dead / "params.swp").touch()
    owned = OwnedFolders.claim(paths, run="new", rank=0, world_size=1)
    assert [folder.parents[2] for folder in owned.removed] == paths
    assert not list(tmp_path.rglob("*.swp"))
    owned.release()


def test_drive_that_can_not_be_cleared_is_named_and_the_others_are_cleared(
    tmp_path: Path
) -> None:
    """Else one drive that went read-only keeps the files on all others."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    owned = OwnedFolders.claim(paths, run="run", rank=0, world_size=1)
    for folder in owned.folders:
        (folder / "params.swp").touch()
    stubborn = owned.folders[1] / "params.swp"
    if subprocess.run(["chattr", "+i", str(stubborn)], capture_output=True).returncode:
        pytest.skip("no immutable files here")
    try:
        with pytest.raises(SwapPathError) as raised:
            owned.release()
    finally:
        subprocess.run(["chattr", "-i", str(stubborn)], check=True)
    assert raised.value.path == owned.folders[1]
    assert not owned.folders[0].exists() and not owned.folders[2].exists()
