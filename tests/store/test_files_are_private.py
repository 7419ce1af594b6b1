"""Swap files hold weights: nobody else reads them, and nobody makes us write elsewhere."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.errors import SwapPathError
from nvmeswap.io.engine import Lane
from nvmeswap.io.probe import probe_folder
from nvmeswap.store.manifest import Manifest, TensorSpec
from nvmeswap.store.owner import OwnedFolder

PACKAGE = Path(__file__).parents[2] / "nvmeswap"
MiB = 1 << 20


def flat(nbytes: int) -> TensorSpec:
    return TensorSpec(torch.uint8, (nbytes,), (1,))


def claim(nvme_path: Path) -> OwnedFolder:
    return OwnedFolder.claim(nvme_path, run="run", rank=0, world_size=1)


@pytest.fixture(params=(0, 0o077), ids=("umask 0", "umask 077"))
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside that nobody may change."""
    path = tmp_path / "outside" / "precious"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def modes_below(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): stat.filemode(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


@pytest.mark.usefixtures("any_umask")
def test_everything_that_a_run_makes_is_for_its_user_alone(workshop: Any, nvme_path: Path) -> None:
    """Weights in a shared folder can be copied by whoever has an account on the machine."""
    store = workshop.store(nvme_path)
    store.create_file("params.swp", {"weight": flat(MiB)})
    store.allocate_many("tensors.swp", {"tensor": flat(100 * MiB)})  # grows
    assert modes_below(nvme_path) == {
        "nvmeswap": "drwx------",
        "nvmeswap/.lock": "-rw-------",
        "nvmeswap/run": "drwx------",
        "nvmeswap/run/rank00000": "drwx------",
        "nvmeswap/run/rank00000/owner.json": "-rw-------",
        "nvmeswap/run/rank00000/manifest.json": "-rw-------",
        "nvmeswap/run/rank00000/params.swp": "-rw-------",
        "nvmeswap/run/rank00000/tensors.swp": "-rw-------",
    }


@pytest.mark.usefixtures("any_umask")
def test_what_the_probe_and_a_half_saved_manifest_leave_to_see_is_private(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that live for a moment only are seen by who looks at that moment."""
    seen: dict[str, str] = {}

    def look(*_: object) -> None:
        seen.update(modes_below(nvme_path))

    real_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (look(), real_fsync(fd)))
    Manifest(run="run", rank=0, world_size=1).save(nvme_path / "manifest.json")
    monkeypatch.setattr(os, "preadv", look)
    probe_folder(nvme_path)
    assert seen.pop("manifest.partial") == "-rw-------"
    assert seen.pop("manifest.json") == "-rw-------"
    assert list(seen.values()) == ["-rw-------"]  # the probe's


def test_folder_of_an_older_run_that_others_may_enter_is_narrowed(nvme_path: Path) -> None:
    """Else one start with a wide umask leaves the door open for all later ones."""
    for folder in ("nvmeswap", "nvmeswap/run", "nvmeswap/run/rank00000"):
        (nvme_path / folder).mkdir()
        (nvme_path / folder).chmod(0o777)
    claim(nvme_path)
    assert set(modes_below(nvme_path).values()) == {"drwx------", "-rw-------"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_that_another_user_has_prepared_is_refused(nvme_path: Path) -> None:
    """Its owner could read, exchange and remove what lies in it."""
    (nvme_path / "nvmeswap").mkdir()
    os.chown(nvme_path / "nvmeswap", 65534, 65534)
    with pytest.raises(SwapPathError) as raised:
        claim(nvme_path)
    assert raised.value.cause is not None
    assert "65534" in raised.value.cause
    assert list((nvme_path / "nvmeswap").iterdir()) == []


@pytest.mark.parametrize("planted", ("nvmeswap", "nvmeswap/run", "nvmeswap/run/rank00000"))
def test_link_planted_as_a_folder_is_not_followed(
    nvme_path: Path, precious: Path, planted: str
) -> None:
    """Whoever can write in nvme_path would have our files made where he likes."""
    (nvme_path / planted).parent.mkdir(parents=True, exist_ok=True)
    (nvme_path / planted).symlink_to(precious.parent)
    with pytest.raises(SwapPathError) as raised:
        claim(nvme_path)
    assert raised.value.path == nvme_path
    assert raised.value.fix
    assert modes_below(precious.parent).keys() == {"precious"}
    assert (nvme_path / planted).is_symlink()


@pytest.mark.parametrize("planted", (".lock", "run/rank00000/owner.json"))
@pytest.mark.parametrize("exists", (True, False), ids=("to a file", "to nothing"))
def test_link_planted_as_our_lock_is_not_followed(
    nvme_path: Path, precious: Path, planted: str, exists: bool
) -> None:
    """Process id and run name would be written over the file behind the link."""
    link = nvme_path / "nvmeswap" / planted
    link.parent.mkdir(parents=True)
    link.symlink_to(precious if exists else precious.with_name("made"))
    with pytest.raises(SwapPathError):
        claim(nvme_path)
    assert link.is_symlink()
    assert precious.read_text() == "precious"
    assert not precious.with_name("made").exists()


def test_hard_link_planted_as_owner_file_is_not_written_through(
    nvme_path: Path, precious: Path
) -> None:
    """O_NOFOLLOW does not see hard links; an owner file that is there must not be written to."""
    folder = nvme_path / "nvmeswap" / "run" / "rank00000"
    folder.mkdir(parents=True)
    os.link(precious, folder / "owner.json")
    claim(nvme_path)
    assert precious.read_text() == "precious"
    assert precious.stat().st_nlink == 1


@pytest.mark.parametrize("make", (Path.mkdir, os.mkfifo), ids=("folder", "pipe"))
def test_owner_file_that_is_no_file_is_refused(
    nvme_path: Path, make: Callable[[Path], None]
) -> None:
    """Opening a pipe would hang, and removing a folder fail, in every later start."""
    folder = nvme_path / "nvmeswap" / "run" / "rank00000"
    folder.mkdir(parents=True)
    make(folder / "owner.json")
    with pytest.raises(SwapPathError):
        claim(nvme_path)
    assert (folder / "owner.json").exists()


@pytest.mark.parametrize("planted", ("manifest.json", "manifest.partial"))
@pytest.mark.parametrize("exists", (True, False), ids=("to a file", "to nothing"))
def test_link_planted_as_the_manifest_is_replaced_not_followed(
    workshop: Any, nvme_path: Path, precious: Path, planted: str, exists: bool
) -> None:
    """The manifest would be written over whatever the link names."""
    store = workshop.store(nvme_path)
    (store.folder / planted).symlink_to(precious if exists else precious.with_name("made"))
    store.create_file("params.swp", {"weight": flat(4096)})
    assert stat.S_ISREG((store.folder / "manifest.json").lstat().st_mode)
    assert "weight" in Manifest.load(store.folder / "manifest.json").entries
    assert not (store.folder / "manifest.partial").is_symlink()
    assert precious.read_text() == "precious"
    assert not precious.with_name("made").exists()


def test_manifest_behind_a_link_is_not_read(nvme_path: Path) -> None:
    """A manifest that somebody else wrote would say where to read weights from."""
    Manifest(run="run", rank=0, world_size=1).save(nvme_path / "other.json")
    (nvme_path / "manifest.json").symlink_to(nvme_path / "other.json")
    with pytest.raises(OSError):
        Manifest.load(nvme_path / "manifest.json")


@pytest.mark.parametrize("exists", (True, False), ids=("to a file", "to nothing"))
def test_link_planted_as_a_swap_file_is_not_followed(
    workshop: Any, nvme_path: Path, precious: Path, exists: bool
) -> None:
    """Weights would be written over another file, or into a folder that others read."""
    store = workshop.store(nvme_path)
    (store.folder / "params.swp").symlink_to(precious if exists else precious.with_name("made"))
    with pytest.raises(SwapPathError):
        store.create_file("params.swp", {"weight": flat(4096)})
    assert precious.read_text() == "precious"
    assert not precious.with_name("made").exists()


def test_swap_file_exchanged_for_a_link_does_not_grow_through_it(
    workshop: Any, nvme_path: Path, precious: Path
) -> None:
    """Growing by name would take its space in the file behind the link."""
    store = workshop.store(nvme_path)
    store.allocate_many("tensors.swp", {"small": flat(4096)})
    (store.folder / "tensors.swp").unlink()
    (store.folder / "tensors.swp").symlink_to(precious)
    store.allocate_many("tensors.swp", {"large": flat(100 * MiB)})  # in the file that was opened
    assert precious.read_text() == "precious"


KEYS = (
    "../../x", "a/b", "/etc/nvmeswap", "\0", "", ".", "..", "params.swp", "owner.json",
    "é\n\udc80", "k" * 10_000, "%s{0}$HOME", "-rf", "a" * 255 + "/",
)


def test_keys_are_never_paths(workshop: Any, nvme_path: Path) -> None:
    """A parameter called "../../x" would be written outside, or a long name fail in training."""
    store = workshop.store(nvme_path)
    store.create_file("params.swp", {key: flat(100 + i) for i, key in enumerate(KEYS)})
    for i, key in enumerate(KEYS):
        store.write(key, torch.full((100 + i,), i, dtype=torch.uint8), lane=Lane.WRITEBACK).wait()
    for i, key in enumerate(KEYS):
        memory = torch.full((100 + i,), 0xAA, dtype=torch.uint8)
        store.read(key, memory, lane=Lane.DEMAND).wait()
        assert bool((memory == i).all()), repr(key[:20])
    names = {path.name for path in nvme_path.rglob("*") if path.is_file()}
    assert names == {".lock", "owner.json", "manifest.json", "params.swp"}
    assert set(Manifest.load(store.folder / "manifest.json").entries) == set(KEYS)
    assert {path.name for path in nvme_path.parent.iterdir()} == {"nvme"}


def test_tensors_of_any_name_come_back_and_make_no_file(nvme_path: Path) -> None:
    """The same through the front door."""
    with TensorSwapper(nvme_path) as swapper:
        for i, key in enumerate(KEYS):
            swapper.swap_out(key, torch.full((100 + i,), i))
        for i, key in enumerate(KEYS):
            assert torch.equal(swapper.swap_in(key), torch.full((100 + i,), i)), repr(key[:20])
        names = {path.name for path in nvme_path.rglob("*") if path.is_file()}
        assert names <= {".lock", "owner.json", "manifest.json", "tensors.swp"}
    assert {path.name for path in nvme_path.parent.iterdir()} == {"nvme"}


def _is_of_data_only(line: str) -> bool:
    return "torch.save(" in line or ("torch.load(" in line and "weights_only=True" in line)


def test_nothing_in_the_package_reads_or_writes_pickles() -> None:
    """A pickle runs whatever its author likes; a swap folder must never hold one. Checkpoints are
    torch's, whose unpickler here makes data only."""
    forbidden = re.compile(
        r"\b(import|from)\s+(pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b"
        r"|\b(pickle|marshal|shelve)\.\w+\(|\btorch\.(load|save)\s*\(|\ballow_pickle\b"
        r"|\bweights_only\b"
    )
    found = {
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line)
        and not (path.parent.name == "checkpoint" and _is_of_data_only(line))
    }
    assert found == set()
