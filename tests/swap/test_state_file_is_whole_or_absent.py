"""A state file is at its path when it is complete; before, an older one is, and nothing else."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nvmeswap.errors import (
    SwapClosedError,
    SwapPathError,
    SwapReadError,
    SwapSpaceError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.swap.state_file import StateFileReader, StateFileWriter, TensorShape
from tests.swap.state_files import OLDER, MiB, assert_same, save, shapes_of


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Path]:
    """The path of an older file, which must be what it was, alone in its folder, at the end."""
    path = tmp_path / "saved" / "state.safetensors"
    path.parent.mkdir()
    save(path, OLDER)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_exception_in_the_block_leaves_the_older_file(older: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        StateFileWriter(older, {"a": TensorShape(torch.int8, (4,))}) as file,
    ):
        file.write("a", 0, torch.ones(4, dtype=torch.int8))
        raise KeyboardInterrupt


@pytest.mark.parametrize("written", [(), (0, 1, 2), (0, 0, 1, 2, 3)], ids=str)
def test_what_was_not_written_once_is_never_completed(older: Path, written: tuple[int]) -> None:
    """Zeros in place of a moment would be read as a moment."""
    with (
        pytest.raises(SwapUsageError, match="'a'"),
        StateFileWriter(older, {"a": TensorShape(torch.int8, (2, 2))}) as file,
    ):
        for start in written:
            file.write("a", start, torch.ones(1, dtype=torch.int8))


def test_discarded_file_is_gone_and_stays_closed(older: Path) -> None:
    with StateFileWriter(older, {"a": TensorShape(torch.int8, (1,))}) as file:
        file.discard()
        file.discard()
        with pytest.raises(SwapClosedError):
            file.write("a", 0, torch.ones(1, dtype=torch.int8))
        with pytest.raises(SwapClosedError):
            file.complete()


def test_completed_file_is_there_before_the_block_ends(tmp_path: Path) -> None:
    with StateFileWriter(tmp_path / "state", shapes_of(OLDER)) as file:
        file.write("older", 0, OLDER["older"])
        assert not (tmp_path / "state").exists()
        file.complete()
        file.complete()
        assert_same(load_file(tmp_path / "state"), OLDER)
        with pytest.raises(SwapClosedError):
            file.write("older", 0, OLDER["older"])
    assert os.listdir(tmp_path) == ["state"]


def test_relative_path_means_what_it_meant_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with StateFileWriter("state", shapes_of(OLDER)) as file:
        monkeypatch.chdir("/")
        file.write("older", 0, OLDER["older"])
    assert_same(load_file(tmp_path / "state"), OLDER)


def test_killed_process_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(path, OLDER)
    script = """if True:
        import os, signal, sys, torch
        from nvmeswap.swap.state_file import StateFileWriter, TensorShape
        file = StateFileWriter(sys.argv[1], {"a": TensorShape(torch.int8, (8,))})
        file.write("a", 0, torch.ones(4, dtype=torch.int8))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", script, str(path)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert_same(load_file(path), OLDER)
    save(path, {"newer": torch.ones(3)})  # what was left behind is in nobody's way
    assert_same(load_file(path), {"newer": torch.ones(3)})


def test_full_disk_is_known_before_the_first_piece(mount_tmpfs: Callable[[str], Path]) -> None:
    folder = mount_tmpfs("tmpfs -o size=8m")
    path = folder / "state"
    save(path, OLDER)
    with pytest.raises(SwapSpaceError) as full:
        StateFileWriter(path, {"a": TensorShape(torch.float32, (4 * MiB,))})
    assert full.value.path == path
    assert full.value.wanted_nbytes is not None and full.value.wanted_nbytes > 16 * MiB
    assert full.value.got_nbytes is not None and full.value.got_nbytes <= 8 * MiB
    assert os.listdir(folder) == ["state"]
    assert_same(load_file(path), OLDER)


def test_space_that_is_announced_is_taken(mount_tmpfs: Callable[[str], Path]) -> None:
    """Else somebody else's file fills the disk in the middle of a save."""
    folder = mount_tmpfs("tmpfs -o size=8m")
    half = torch.ones(6 * MiB, dtype=torch.int8)
    with StateFileWriter(folder / "state", shapes_of({"a": half})) as file:
        with pytest.raises(SwapSpaceError), StateFileWriter(folder / "b", shapes_of({"a": half})):
            pass
        with contextlib.suppress(OSError):
            (folder / "other").write_bytes(bytes(8 * MiB))
        file.write("a", 0, half)
    assert_same(load_file(folder / "state"), {"a": half})


def test_file_size_limit_leaves_nothing(older: Path) -> None:
    with file_size_limit(MiB), pytest.raises(SwapWriteError) as refused:
        StateFileWriter(older, {"a": TensorShape(torch.float32, (4 * MiB,))})
    assert not isinstance(refused.value, SwapSpaceError)
    assert refused.value.path == older


def test_write_that_failed_may_be_repeated(tmp_path: Path) -> None:
    values = torch.arange(MiB)
    with StateFileWriter(tmp_path / "state", shapes_of({"a": values})) as file:
        with file_size_limit(MiB), pytest.raises(SwapWriteError) as failed:
            file.write("a", 0, values)
        assert failed.value.offset_bytes is not None
        file.write("a", 0, values)
    assert_same(load_file(tmp_path / "state"), {"a": values})


def test_places_that_can_not_be_written_are_named(
    tmp_path: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    read_only = mount_tmpfs("tmpfs -o ro")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for path in (
        tmp_path / "missing" / "state", tmp_path / "folder", tmp_path / "file" / "state",
        read_only / "state", tmp_path / ("n" * 250),
    ):
        with pytest.raises(SwapPathError) as refused:
            StateFileWriter(path, shapes_of(OLDER))
        assert refused.value.path == path
    assert sorted(tmp_path.iterdir()) == before
    assert os.listdir(tmp_path / "folder") == []


@pytest.fixture
def thin_drive(mount_tmpfs: Callable[[str], Path], tmp_path: Path) -> Iterator[Path]:
    """A folder on an ext4 of 64 MiB, of which its drive can keep 8; skips where mounting is
    forbidden."""
    image, folder = mount_tmpfs("tmpfs -o size=8m") / "image", tmp_path / "thin"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MiB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_values_that_the_drive_did_not_take_never_replace_the_older_file(thin_drive: Path) -> None:
    """The page cache takes them all; only the fsync tells."""
    path = thin_drive / "state"
    save(path, OLDER)
    with pytest.raises(SwapWriteError) as failed:
        save(path, {"a": torch.arange(4 * MiB)})
    assert failed.value.path == path
    assert_same(load_file(path), OLDER)
    assert not list(thin_drive.glob("*.partial"))


def test_drive_that_is_lost_is_an_error_and_no_signal(
    drive_to_lose: tuple[Path, Callable[[], None]]
) -> None:
    folder, lose = drive_to_lose
    values = torch.arange(8 * MiB)
    save(folder / "state", {"a": values})
    with StateFileReader(folder / "state") as file:
        fd = os.open(folder / "state", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        lose()
        with pytest.raises(SwapReadError) as failed:
            file.read("a", 0, values.numel())
    assert failed.value.path == folder / "state"


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_mode_is_what_torch_save_gives(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "ours", OLDER)
        torch.save(OLDER, tmp_path / "torch")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "torch")]
    assert modes[0] == modes[1] == 0o666 & ~umask
