"""What holds for all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.io.fake_gds.programs import Programs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the line that runs exactly the failed tests again, with the same random examples."""
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if not failed:
        return
    seed = terminalreporter.config.getoption("--hypothesis-seed", default=None)
    options = [] if seed is None else [f"--hypothesis-seed={seed}"]
    tests = sorted({report.nodeid for report in failed})
    terminalreporter.line("rerun: tools/test " + " ".join([*options, *tests]))


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs over a CUDA driver and a cuFile that need no GPU."""
    from tests.io.fake_gds.programs import programs_over_fakes

    with programs_over_fakes(tmp_path_factory.mktemp("fakes")) as programs:
        yield programs


@pytest.fixture
def drive_to_lose(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder on an ext4 of its own, and a call after which its drive answers EIO; skips where
    mounting is forbidden."""
    image, folder = tmp_path / "image", tmp_path / "lost"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")

    def lose() -> None:
        subprocess.run(["sync", "--file-system", str(folder)], check=True)
        os.truncate(image, 1 << 20)  # which ends the loop device

    yield folder, lose
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a filesystem in memory, such as "tmpfs -o size=8m"; skips where that is forbidden."""
    mounted: list[Path] = []

    def mount(what: str) -> Path:
        kind, *options = what.split()
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", kind, *options, kind, str(folder)],
                              capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"can't mount {kind}: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
