"""`nvmeswap doctor`: facts of this machine, each judged, with what mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.cli.doctor import kernel, software
from nvmeswap.cli.doctor.finding import Status
from nvmeswap.cli.main import main
from nvmeswap.store.owner import OwnedFolder

Doctor = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Exit status, and the findings by name."""

    def run(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        out = tmp_path / "doctor.json"
        code = main(["doctor", *arguments, "--json", str(out)])
        content = json.loads(out.read_text())
        found = {finding["name"]: finding for finding in content["findings"]}
        assert content["status"] in ("ok", "warn", "fail")
        return code, found

    return run


def test_good_folder_is_told_with_backend_and_alignment(doctor: Doctor, tmp_path: Path) -> None:
    # field case J01: what was tried is told
    code, found = doctor("--path", str(tmp_path), "--need", "1M")
    assert code == 0
    assert found["folder"]["status"] == "ok"
    assert found["folder"]["facts"]["uid"] == os.geteuid()
    assert found["backend"]["facts"]["backend"] in ("uring", "aio", "posix")
    assert found["direct I/O"]["facts"]["offset_alignment_nbytes"] >= 4096
    assert found["space"]["facts"]["free_nbytes"] > 0
    assert found["memory"]["facts"]["available_nbytes"] > 0
    assert found["gpudirect storage"]["status"] == "ok"
    assert {"kernel", "io_uring", "aio", "huge pages", "memlock", "gpu", "processor", "torch",
            "python", "deepspeed", "filesystem", "runs"} <= found.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


def test_every_warning_and_failure_has_a_fix(doctor: Doctor) -> None:
    # field cases I02, J03
    _, found = doctor("--path", "/dev/shm", "--path", "/missing")
    bad = [finding for finding in found.values() if finding["status"] != "ok"]
    assert bad and all(finding["fix"] for finding in bad)


def test_missing_folder_fails(doctor: Doctor, tmp_path: Path) -> None:
    # field case M01
    code, found = doctor("--path", str(tmp_path / "missing"))
    assert code == 1
    assert found["folder"]["status"] == "fail"
    assert "mkdir" in found["folder"]["fix"]


def test_folder_in_memory_is_warned_of(doctor: Doctor) -> None:
    # field case A15
    code, found = doctor("--path", "/dev/shm", "--need", "1M")
    assert code == 0
    assert found["filesystem"]["status"] == "warn"
    assert found["filesystem"]["facts"]["filesystem"] == "tmpfs"


def test_more_memory_than_there_is_fails(doctor: Doctor) -> None:
    # field case B01
    code, found = doctor("--need", "1000T")
    assert code == 1
    assert found["memory"]["status"] == "fail"
    assert found["memory"]["facts"]["needed_nbytes"] == 1000 << 40


def test_user_without_rights_is_told_what_is_missing() -> None:
    """Locked memory is small, and the folder is somebody else's; root plays another user."""
    # field cases B05, I03, M02
    script = (
        "import os, resource, sys\n"
        "from nvmeswap.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.geteuid() or os.setuid(65534)\n"
        "sys.exit(main(['doctor', '--path', sys.argv[1], '--need', '1M', '--json', '-']))"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as closed:  # where others may look
        os.chmod(closed, 0o555)
        done = subprocess.run([sys.executable, "-c", script, closed], capture_output=True,
                              text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["folder"]["status"] == "fail"
    assert "uid" in found["folder"]["what"] and "r-x" in found["folder"]["what"]
    assert "backend" not in found
    if found["memlock"]["facts"]["by_cuda"]:
        pytest.skip("CUDA locks without a limit")
    assert found["memlock"]["status"] == "warn"
    assert "page-locked" in found["memlock"]["what"]
    assert "pin_memory" in found["memlock"]["fix"]


def test_live_and_dead_runs_are_told_apart(doctor: Doctor, tmp_path: Path) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    live = OwnedFolder.claim(folder, run="live", rank=0, world_size=1)
    code, found = doctor("--path", str(folder))
    assert code == 0
    assert found["runs"]["status"] == "ok"
    (told,) = found["runs"]["facts"]["live"]
    assert told["pid"] == os.getpid()
    (live.folder / "params.swp").write_bytes(b"x" * 1000)
    live.release(remove=False)  # as after kill -9
    code, found = doctor("--path", str(folder))
    assert code == 0
    assert found["runs"]["status"] == "warn"
    (told,) = found["runs"]["facts"]["stale"]
    assert told["folder"] == str(live.folder) and told["nbytes"] == 1000
    assert (live.folder / "params.swp").exists()  # a doctor looks, and touches nothing


@pytest.fixture
def kernel_that_says(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The kernel's findings by name, from files with these contents."""

    def findings(**files: str) -> dict[str, Any]:
        places = {
            "uring": "proc/sys/kernel/io_uring_disabled", "nr": "proc/sys/fs/aio-nr",
            "most": "proc/sys/fs/aio-max-nr",
            "huge": "sys/kernel/mm/transparent_hugepage/enabled",
        }
        for name, content in files.items():
            path = tmp_path / places[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        found = kernel.check(proc=tmp_path / "proc", sysfs=tmp_path / "sys")
        return {finding.name: finding for finding in found}

    return findings


def test_forbidden_io_uring_is_warned_of(kernel_that_says: Callable[..., Any]) -> None:
    # field case I01
    assert kernel_that_says(uring="0\n")["io_uring"].status is Status.OK
    forbidden = kernel_that_says(uring="2\n")["io_uring"]
    assert forbidden.status is Status.WARN and "io_uring_disabled=0" in forbidden.fix
    assert kernel_that_says()["io_uring"].facts["io_uring_disabled"] == 2


def test_used_up_aio_events_are_warned_of_with_both_numbers(
    kernel_that_says: Callable[..., Any],
) -> None:
    # field case I05
    assert kernel_that_says(nr="0", most="65536")["aio"].status is Status.OK
    full = kernel_that_says(nr="65500", most="65536")["aio"]
    assert full.status is Status.WARN
    assert "65500" in full.what and "65536" in full.what and "fs.aio-max-nr" in full.fix


def test_small_pages_are_warned_of(kernel_that_says: Callable[..., Any]) -> None:
    assert kernel_that_says(huge="always [madvise] never")["huge pages"].status is Status.OK
    assert kernel_that_says(huge="always madvise [never]")["huge pages"].status is Status.WARN


@pytest.mark.parametrize("version,status", [
    ("2.10.1", Status.FAIL), ("2.11.0+cu128", Status.OK), ("2.14.2", Status.OK),
    ("3.0.0", Status.WARN),
])
def test_torch_is_judged_by_its_version(version: str, status: Status) -> None:
    assert software.torch_version(version).status is status
