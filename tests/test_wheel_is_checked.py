"""A wheel that a user could not install or import is never handed out (tools/wheel). Building one
needs the network; what is checked here does not."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "wheel"))
NAME = "nvmeswap-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl"
SCRIPTS = "[console_scripts]\nnvmeswap = a:main\nnvmeswap-bench = b:main\n"

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("readelf")), reason="no C compiler"
)


class Pack(Protocol):
    def __call__(self, name: str = NAME, scripts: str = SCRIPTS) -> list[str]: ...


def link(library: Path, *needed: Path, options: str = "-Wl,--strip-all") -> Path:
    """An empty shared library that needs others."""
    library.parent.mkdir(exist_ok=True)
    subprocess.run(["cc", "-shared", "-nostdlib", "-Wl,--no-as-needed", options, "-o", library,
                    f"-Wl,-soname,{library.name}", "-x", "c", "/dev/null", "-x", "none", *needed],
                   check=True)
    return library


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """What a good wheel holds."""
    folder = tmp_path / "unpacked"
    for name in TOOL["package_files"]():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    licences = folder / "nvmeswap-0.1.0.dist-info" / "licenses"
    licences.mkdir(parents=True)
    for package in ("libaio", "liburing", "libxxhash"):
        (licences / f"LICENSE.{package}").touch()
    inside = [link(folder / "nvmeswap.libs" / name)
              for name in ("libaio-1a2b.so.1", "liburing-3c4d.so.2")]
    link(folder / "nvmeswap" / "_native.abi3.so", *inside)
    return folder


@pytest.fixture
def faults(unpacked: Path, tmp_path: Path) -> Pack:
    """Packs `unpacked` into a wheel and asks the tool what is wrong with it."""
    def pack(name: str = NAME, scripts: str = SCRIPTS) -> list[str]:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path in sorted(unpacked.rglob("*")):
                archive.write(path, path.relative_to(unpacked))
            archive.writestr("nvmeswap-0.1.0.dist-info/entry_points.txt", scripts)
        found: list[str] = TOOL["faults_of"](tmp_path / name)
        return found

    return pack


@needs_compiler
def test_good_wheel_has_no_faults(faults: Pack) -> None:
    assert faults() == []


@needs_compiler
@pytest.mark.parametrize("tags", ["cp311-cp311-manylinux_2_34", "cp310-abi3-linux"])
def test_wheel_for_one_python_or_one_machine_is_refused(faults: Pack, tags: str) -> None:
    assert "is not tagged" in faults(f"nvmeswap-0.1.0-{tags}_x86_64.whl")[0]


@needs_compiler
def test_wheel_for_a_newer_system_than_promised_is_refused(faults: Pack) -> None:
    told, = faults("nvmeswap-0.1.0-cp310-abi3-manylinux_2_38_x86_64.whl")
    assert "needs glibc 2.38" in told and "older system" in told


@needs_compiler
@pytest.mark.parametrize("name", [
    "nvmeswap/py.typed", "nvmeswap/_native.pyi", "nvmeswap/examples/train_lm.py",
])
def test_file_that_is_missing_is_named(faults: Pack, unpacked: Path, name: str) -> None:
    (unpacked / name).unlink()
    assert faults() == [f"{name} is missing"]


@needs_compiler
def test_command_that_is_missing_is_named(faults: Pack) -> None:
    told = faults(scripts="[console_scripts]\nnvmeswap = a:main\n")
    assert told == ["the command nvmeswap-bench is missing"]


@needs_compiler
def test_terms_that_are_missing_are_named(faults: Pack, unpacked: Path) -> None:
    """Whoever hands the wheel on must hand them on, too."""
    (unpacked / "nvmeswap-0.1.0.dist-info" / "licenses" / "LICENSE.libaio").unlink()
    assert faults() == ["the terms of libaio-dev are missing"]


@needs_compiler
def test_library_of_the_system_is_named(faults: Pack, unpacked: Path, tmp_path: Path) -> None:
    """It would be there on the machine that built the wheel, and on few others."""
    stranger = link(tmp_path / "libstrange.so.1")
    link(unpacked / "nvmeswap" / "_native.abi3.so", stranger)
    shutil.rmtree(unpacked / "nvmeswap.libs")
    assert faults() == ["libaio is not inside", "liburing is not inside",
                        "_native.abi3.so needs libstrange.so.1 of the system"]


@needs_compiler
def test_symbols_are_refused(faults: Pack, unpacked: Path) -> None:
    link(unpacked / "nvmeswap.libs" / "libaio-1a2b.so.1", options="-g")
    assert faults() == ["libaio-1a2b.so.1 has symbols"]


@needs_compiler
def test_wheel_that_grew_is_refused(faults: Pack, unpacked: Path) -> None:
    (unpacked / "nvmeswap" / "weights").write_bytes(bytes(TOOL["MOST_NBYTES"]))
    told, = faults()
    assert re.fullmatch(r"\d+ bytes are more than \d+", told)


@pytest.mark.parametrize("test", TOOL["QUICK_TESTS"])
def test_quick_tests_exist(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function or 'test_'}" in (ROOT / path).read_text()


def test_quick_tests_visit_every_floor() -> None:
    floors = {Path(test.partition("::")[0]).parent.name for test in TOOL["QUICK_TESTS"]}
    assert {"io", "memory", "store", "swap", "zero3"} <= floors


def test_wheel_is_tried_on_the_oldest_python_that_is_promised() -> None:
    oldest = min(TOOL["PYTHONS"], key=lambda version: int(version.partition(".")[2]))
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f'"cp{oldest.replace(".", "")}"' in (ROOT / "setup.py").read_text()
