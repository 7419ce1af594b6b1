"""The probe finds out by doing, leaves nothing behind, and names what is wrong."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapPathError
from nvmeswap.io import BufferedFallbackWarning, DirectMode, Engine, FilesystemWarning, probe
from nvmeswap.io import filesystem as filesystems
from nvmeswap.io.probe import probe_folder

pytestmark = pytest.mark.filterwarnings("ignore::nvmeswap.io.FilesystemWarning")


def with_faults(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The probe's engines run under the script."""
    monkeypatch.setattr(probe, "Engine", functools.partial(Engine, fault_script=script))


@pytest.mark.parametrize("backend", ("auto", "uring", "aio", "posix", "skeleton"))
def test_prober_of_a_good_folder_learns_its_mode_and_finds_it_clean(
    tmp_path: Path, backend: str
) -> None:
    """Else the store opens files with alignments that the drive refuses.  field case A14"""
    found = probe_folder(tmp_path, backend=backend)
    assert found.folder == tmp_path
    assert found.backend == ("uring" if backend == "auto" else backend)
    assert found.offset_alignment_nbytes >= 4096
    assert 4096 % found.memory_alignment_nbytes == 0
    assert found.refused == ()
    assert list(tmp_path.iterdir()) == []


def test_prober_who_wants_no_direct_io_gets_none(tmp_path: Path) -> None:
    """Else a setting is ignored."""
    assert not probe_folder(tmp_path, direct=DirectMode.OFF).direct


def test_prober_where_the_first_transfer_is_refused_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else only open() is believed, and training fails at the first write.  field case A13"""
    with_faults(monkeypatch, "write 1 errno 22")
    with pytest.warns(BufferedFallbackWarning) as told:
        found = probe_folder(tmp_path)
        assert probe_folder(tmp_path) == found
    assert (found.direct, found.backend) == (False, "uring")
    assert len([one for one in told if one.category is BufferedFallbackWarning]) == 1
    text = str(told[0].message)
    assert str(tmp_path) in text
    assert found.filesystem in text
    assert "22" in text
    with pytest.raises(SwapPathError) as raised:
        probe_folder(tmp_path, direct=DirectMode.REQUIRE)
    assert (raised.value.errno, raised.value.path) == (errno.EINVAL, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ("write 1 errno 38", "read 1 flip"))
@pytest.mark.parametrize(("broken", "chosen"), ((("uring",), "aio"), (("uring", "aio"), "posix")))
def test_prober_where_a_backend_fails_or_lies_climbs_down_and_keeps_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, broken: tuple[str, ...],
    chosen: str,
) -> None:
    """Else a container without AIO has no swap, or nobody knows why it is slow."""

    def engine(*, backend: str, **options: int) -> Engine:
        return Engine(backend=backend, fault_script=fault if backend in broken else None, **options)

    monkeypatch.setattr(probe, "Engine", engine)
    found = probe_folder(tmp_path)
    assert (found.backend, found.direct) == (chosen, True)
    assert tuple(refusal.backend for refusal in found.refused) == broken
    assert all(refusal.reason for refusal in found.refused)


# Loads a seccomp filter that answers errno argv[2] to io_uring_setup (425), as Docker's profile
# does: load the number; if equal go on, else skip one; return errno; return allow.
SECCOMP_PROGRAM = """
import ctypes, struct, sys
from pathlib import Path
from nvmeswap.io import probe_folder
code = int(sys.argv[2])
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | code), (0x06, 0, 0, 0x7fff0000)]
steps = b"".join(struct.pack("HBBI", *line) for line in lines)
steps = ctypes.create_string_buffer(steps)
program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(steps))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
found = probe_folder(Path(sys.argv[1]))
print(found.backend, found.refused)
"""


@pytest.mark.parametrize(("code", "word"), ((errno.EPERM, "io_uring_disabled"),
                                            (errno.ENOSYS, "seccomp")))
def test_prober_in_a_container_that_forbids_io_uring_learns_who_does(
    tmp_path: Path, code: int, word: str
) -> None:
    """Else "Operation not permitted" sends the user after file permissions."""
    done = subprocess.run([sys.executable, "-c", SECCOMP_PROGRAM, str(tmp_path), str(code)],
                          text=True, capture_output=True, timeout=60, check=False,
                          cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("aio (Refusal(backend='uring'"), done.stdout + done.stderr
    assert word in done.stdout
    assert "seccomp" in done.stdout
    assert errno.errorcode[code] in done.stdout


def test_prober_in_a_forked_child_of_a_computing_parent_ends(tmp_path: Path) -> None:
    """Else a forked rank waits for ever for torch's threads, which stayed with the parent."""
    values = torch.arange(1 << 20)
    assert int((values % 3).sum()) > 0  # with threads
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            os._exit(0 if probe_folder(tmp_path).backend else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_prober_where_nothing_can_be_asked_not_to_block_takes_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each io_uring transfer on tmpfs takes a detour through a kernel worker."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "preadv", refuse)
    found = probe_folder(tmp_path)
    assert found.backend == "posix"
    assert [refusal.backend for refusal in found.refused] == ["uring", "aio"]
    assert all("RWF_NOWAIT" in refusal.reason for refusal in found.refused)
    assert probe_folder(tmp_path, backend="uring").backend == "uring"


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or filesystems.filesystem_type(Path("/dev/shm")) != "tmpfs",
    reason="needs a tmpfs",
)
def test_prober_of_a_tmpfs_takes_threads() -> None:
    """Else the check above asks a question that no filesystem answers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nvmeswap-test-") as folder:
        assert probe_folder(Path(folder)).backend == "posix"


def test_prober_of_an_unknown_backend_learns_which_exist(tmp_path: Path) -> None:
    """Else a typing error in the configuration is a riddle."""
    with pytest.raises(SwapPathError) as raised:
        probe_folder(tmp_path, backend="oai")
    assert raised.value.cause is not None
    assert "posix" in raised.value.cause


def test_prober_of_a_missing_folder_or_a_file_is_told_which(tmp_path: Path) -> None:
    """Else the error names a temporary file that the user never heard of."""
    (tmp_path / "file").touch()
    for name, code in (("missing", errno.ENOENT), ("file", errno.ENOTDIR)):
        with pytest.raises(SwapPathError) as raised:
            probe_folder(tmp_path / name)
        assert (raised.value.errno, raised.value.path) == (code, tmp_path / name)
        assert raised.value.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_prober_without_permission_is_told_user_mode_and_fix(tmp_path: Path) -> None:
    """Else "Permission denied" says neither who nor where."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/pytest"):
            folder.chmod(0o755)
    program = (
        "import sys, os; from pathlib import Path; from nvmeswap.io import probe_folder\n"
        "os.seteuid(65534)\n"
        "from nvmeswap.errors import SwapPathError\n"
        "try: probe_folder(Path(sys.argv[1]))\n"
        "except SwapPathError as error: print(error.errno, error.path, error.cause, error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], text=True, check=True,
                          capture_output=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith(f"{errno.EACCES} {tmp_path} uid 65534"), done.stdout + done.stderr
    assert "drwxr-xr-x" in done.stdout


@pytest.mark.parametrize(
    ("kind", "word"),
    (("btrfs", "page cache"), ("zfs", "cache"), ("overlay", "page cache"), ("nfs4", "network"),
     ("cifs", "network"), ("fuse.sshfs", "page cache"), ("tmpfs", "RAM")),
)
def test_prober_on_a_special_filesystem_is_warned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, word: str
) -> None:
    """Else "direct" is believed where it means nothing.  field case A15"""
    monkeypatch.setattr(probe, "filesystem_type", lambda folder: kind)
    with pytest.warns(FilesystemWarning, match=word) as told:
        assert probe_folder(tmp_path).filesystem == kind
        probe_folder(tmp_path)
    assert len(told) == 1


def test_filesystem_of_a_folder_is_that_of_its_nearest_and_latest_mount(tmp_path: Path) -> None:
    """Else the warning names the root filesystem, or misses a mount point with a blank, or with a
    letter beyond ASCII, in whatever encoding.  field case A15"""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_bytes(
        b"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"22 21 0:20 / /data rw shared:1 - xfs /dev/sdb rw\n"
        b"23 22 0:21 / /data/my\\040disk rw - btrfs /dev/sdc rw\n"
        b"24 21 0:22 / /data rw - nfs4 host:/x rw\n"
        b"25 21 0:23 / /gr\xc3\xb6\xc3\x9fe\\0401 rw - zfs /dev/sdd rw\n"
        b"26 21 0:24 / /gr\xf6\xdfe rw - tmpfs tmpfs rw\n"
    )
    kinds = {"/": "ext4", "/database": "ext4", "/data/x": "nfs4", "/data/my disk/y": "btrfs",
             "/größe 1/x": "zfs", "/gr\udcf6\udcdfe/x": "tmpfs"}
    for folder, kind in kinds.items():
        assert filesystems.filesystem_type(Path(folder), mountinfo=mountinfo) == kind
