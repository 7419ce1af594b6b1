"""A figure that is no measure of the drive says so, and nothing is left behind by measuring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.cli.bench.device import Device, device_of, link_gb_per_s
from nvmeswap.cli.bench.labels import labels
from nvmeswap.cli.bench.main import main
from nvmeswap.cli.bench.trial import TrialFile
from nvmeswap.io.probe import probe_folder

ROOT = Path(__file__).resolve().parents[2]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench_io(tmp_path: Path) -> Bench:
    """`nvmeswap-bench io` with small sizes and more arguments; returns its JSON."""

    def run(*arguments: str, folder: Path = tmp_path) -> dict[str, Any]:
        out = tmp_path / "io.json"
        code = main(["io", "--path", str(folder), "--size", "4M", "--block", "64K", "--depth", "4",
                     "--loops", "1", "--json", str(out), *arguments])
        assert code == 0
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    return run


def test_buffered_run_is_labelled_page_cache(
    bench_io: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    # field case L03
    figures = bench_io("--direct", "off")
    assert "page cache" in capsys.readouterr().out
    assert figures["direct"] is False
    assert figures["direct_nbytes"] == 0
    assert figures["buffered_nbytes"] >= 4 << 20
    assert "page cache" in figures["labels"]


@pytest.mark.parametrize("mode", ["read", "write", "mixed"])
@pytest.mark.parametrize("pattern", ["sequential", "random"])
def test_run_tells_how_it_went(bench_io: Bench, mode: str, pattern: str) -> None:
    # field case G06
    figures = bench_io("--mode", mode, "--pattern", pattern)
    assert figures["gb_per_s"] > 0 and figures["cpu_s_per_gb"] >= 0
    assert 0 < figures["block_p50_s"] <= figures["block_p99_s"]
    assert figures["path"] == ("direct" if figures["direct"] else "buffered")
    assert figures["aligned"] is True
    assert figures["register_s"] >= 0
    # One pass by the clock, one block by block.
    assert figures["direct_nbytes"] + figures["buffered_nbytes"] == 2 * (4 << 20)
    assert figures["backend"] in ("uring", "aio", "posix")


def test_plain_memory_is_told_apart(bench_io: Bench) -> None:
    figures = bench_io("--memory", "plain")
    assert figures["registered_nbytes"] == 0
    if figures["direct"]:
        assert figures["aligned"] is (figures["bounced_nbytes"] == 0)


def test_memory_is_not_a_device(bench_io: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench_io(folder=Path("/dev/shm"))
    assert figures["filesystem"] == "tmpfs"
    assert figures["labels"] == ["memory, not a device"]
    assert "memory, not a device" in capsys.readouterr().out
    assert {"uring", "aio"} == set(figures["refused"])


def test_size_that_does_not_divide_is_rounded_down(bench_io: Bench) -> None:
    figures = bench_io("--size", "1000K", "--block", "64K", "--mode", "write")
    assert figures["direct_nbytes"] + figures["buffered_nbytes"] == 2 * 15 * (64 << 10)


@pytest.mark.parametrize(
    ("link", "speed", "expected"),
    [(None, 1.0, ["link unknown"]), (7.9, 7.0, []), (7.9, 8.0, ["above the link"])],
)
def test_speed_above_the_link_is_no_drive(
    link: float | None, speed: float, expected: list[str]
) -> None:
    found = labels(buffered_nbytes=0, filesystem="ext4", device=Device("nvme0n1", link),
                   one_way_gb_per_s=speed)
    assert found == expected


@pytest.mark.parametrize(
    ("speed", "width", "expected"),
    [
        ("16.0 GT/s PCIe\n", "4\n", 7.88),
        ("8.0 GT/s PCIe", "4", 3.94),
        ("5.0 GT/s PCIe", "2", 1.0),
        ("64.0 GT/s PCIe", "4", 30.25),
        ("Unknown", "4", None),
        ("16.0 GT/s PCIe", "0", None),
    ],
)
def test_link_carries_what_its_generation_does(
    speed: str, width: str, expected: float | None
) -> None:
    found = link_gb_per_s(speed, width)
    assert found == (expected if expected is None else pytest.approx(expected, rel=0.002))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A /sys with two NVMe drives, a partition on each, a RAID over both, and a virtual disk."""
    root = tmp_path / "sys"
    for index in range(2):
        card = root / f"devices/pci0000:00/0000:0{index}:00.0"
        drive = card / f"nvme/nvme{index}/nvme{index}n1"
        partition = drive / f"nvme{index}n1p1"
        partition.mkdir(parents=True)
        (partition / "partition").write_text("1\n")
        (card / "current_link_speed").write_text("16.0 GT/s PCIe\n")
        (card / "current_link_width").write_text("4\n")
        (drive / "device").symlink_to(drive.parent)
    raid = root / "devices/virtual/block/md0"
    (raid / "slaves").mkdir(parents=True)
    for index in range(2):
        (raid / f"slaves/nvme{index}n1p1").symlink_to(
            root / f"devices/pci0000:00/0000:0{index}:00.0/nvme/nvme{index}"
            / f"nvme{index}n1/nvme{index}n1p1"
        )
    (root / "devices/virtio0/vda").mkdir(parents=True)
    (root / "dev/block").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("place", "name", "link"),
    [
        ("devices/pci0000:00/0000:00:00.0/nvme/nvme0/nvme0n1", "nvme0n1", 7.88),
        ("devices/pci0000:00/0000:00:00.0/nvme/nvme0/nvme0n1/nvme0n1p1", "nvme0n1", 7.88),
        ("devices/virtual/block/md0", "md0", 15.75),
        ("devices/virtio0/vda", "vda", None),
        (None, None, None),
    ],
)
def test_device_of_a_folder(
    sysfs: Path, tmp_path: Path, place: str | None, name: str | None, link: float | None
) -> None:
    number = tmp_path.stat().st_dev
    if place is not None:
        entry = sysfs / f"dev/block/{os.major(number)}:{os.minor(number)}"
        entry.symlink_to(sysfs / place)
    found = device_of(tmp_path, sysfs=sysfs)
    assert found.name == name
    assert found.link_gb_per_s == (link if link is None else pytest.approx(link, rel=0.002))


def test_trial_file_is_written_to_its_last_byte(tmp_path: Path) -> None:
    nbytes = (3 << 20) + 4096
    file = TrialFile(tmp_path, nbytes, probe_folder(tmp_path))
    content = file.path.read_bytes()
    assert len(content) == nbytes
    assert all(any(content[first : first + 512]) for first in range(0, nbytes, 512))


@pytest.mark.parametrize("arguments", [["io"], ["tensors", "--count", "8"]])
def test_nothing_is_left(tmp_path: Path, arguments: list[str]) -> None:
    command, *rest = arguments
    sizes = ["--size", "1M", "--block", "64K"] if command == "io" else []
    assert main([command, "--path", str(tmp_path), "--loops", "1", *sizes, *rest]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "nvmeswap.cli.bench.main", "io", "--path", str(tmp_path),
               "--size", "8M", "--block", "64K", "--loops", "1000"]
    # Background jobs ignore SIGINT, and so do their children.
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                          stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob("nvmeswap-bench-*/bench.swp")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # Python drops what is raised within a finalizer
            process.send_signal(number)
            process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_missing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["io", "--path", str(tmp_path / "missing")]) == 1
    assert "mkdir -p" in capsys.readouterr().err


def test_file_that_does_not_fit_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["io", "--path", str(tmp_path), "--size", "1000T"]) == 1
    assert "--size" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block", "1000"],
        ["--block", "2G"],
        ["--size", "0"],
        ["--size", "many"],
        ["--depth", "0"],
        ["--backend", "floppy"],
        ["--size", "64K", "--block", "128K"],
        ["--size", "64K", "--block", "64K", "--mode", "mixed"],
        ["--device", "cuda"],
        ["--gds"],
        ["--device", "cuda", "--gds", "--memory", "plain"],
    ],
)
def test_nonsense_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["io", "--path", str(tmp_path), *arguments])
    assert refusal.value.code == 2
    assert list(tmp_path.iterdir()) == []
