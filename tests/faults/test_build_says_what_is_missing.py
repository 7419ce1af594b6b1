"""A build that can't succeed stops, with one line that mends it; what was built needs old libraries
only.

The house binds libaio and liburing at compile time, so where peers promise "no compile-time
dependency" ours is: no false alarm, and no build that pretends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nvmeswap
from nvmeswap.errors import SwapConfigError
from nvmeswap.io import Engine, probe_folder
from tests.faults.kernel import ROOT, run_program

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def build(source: Path = ROOT, *command: str, **flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the build's own check of the machine, or another command, with flags as a user sets."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")} | flags
    program = "import runpy; runpy.run_path('native/build.py')"
    return subprocess.run([sys.executable, *(command or ("-c", program))], cwd=source, text=True,
                          env=environment, capture_output=True, check=False, timeout=200)


@pytest.fixture
def stub_headers(tmp_path: Path) -> Path:
    """Where nothing but the headers of the libraries lies, empty."""
    folder = tmp_path / "some place"
    folder.mkdir()
    for name in ("libaio.h", "liburing.h", "xxhash.h"):
        (folder / name).touch()
    return folder


@needs_compiler
@pytest.mark.parametrize(
    ("missing", "package"),
    (
        (("libaio.h", "liburing.h", "xxhash.h"), "libaio-dev liburing-dev libxxhash-dev"),
        (("libaio.h",), "libaio-dev"),
        (("liburing.h",), "liburing-dev"),
        (("xxhash.h",), "libxxhash-dev"),
    ),
)
def test_build_without_headers_stops_with_the_line_that_installs_them(
    stub_headers: Path, missing: tuple[str, ...], package: str
) -> None:
    """A page of compiler errors, with the reason far from the end.  field cases J01, J03"""
    for name in missing:
        (stub_headers / name).unlink()
    done = build(CC="cc -nostdinc", CFLAGS=f"'-I{stub_headers}'")
    assert done.returncode == 1
    assert all(name in done.stderr for name in missing)
    assert done.stderr.endswith(f"install: apt-get install {package}\n"), done.stderr
    assert done.stderr.count("\n") == 1


@needs_compiler
@pytest.mark.parametrize("where", ("CFLAGS", "CPPFLAGS", "CC"))
def test_build_finds_headers_wherever_its_own_flags_find_them(
    stub_headers: Path, where: str
) -> None:
    """Headers that are installed are reported missing.  field case J01"""
    flags = {"CC": "cc -nostdinc"}
    flags[where] = f"{flags.get(where, '')} -v '-I{stub_headers}'"  # and however talkative
    done = build(**flags)
    assert (done.returncode, done.stderr) == (0, "")


def test_build_without_a_compiler_names_it(tmp_path: Path) -> None:
    """A traceback out of the build system.  field cases J03, J04"""
    done = build(CC=str(tmp_path / "cc"))
    assert done.returncode == 1
    assert "no C compiler" in done.stderr and "apt-get install gcc" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "word"),
    (({"CC": "cc -nostdinc"}, "apt-get install"),
     ({"LDFLAGS": "-lno_such_library", "CFLAGS": "-O0"}, "no_such")),
    ids=("compiling", "linking"),
)
def test_install_that_can_not_build_the_engine_fails_and_leaves_none(
    tmp_path: Path, flags: dict[str, str], word: str
) -> None:
    """An install that reports success without the engine is found out in training.

    field case J04; peers offer an install without native code, ours always has it or fails.
    """
    source = tmp_path / "source"
    shutil.copytree(ROOT / "native", source / "native",
                    ignore=shutil.ignore_patterns("_native.c", "*.o"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "nvmeswap").mkdir()
    (source / "nvmeswap" / "__init__.py").touch()
    done = build(source, "setup.py", "build_ext", "--inplace", **flags)
    assert done.returncode != 0
    assert word in done.stdout + done.stderr
    assert list(source.rglob("*.so")) == []


OLD_LIBAIO = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
static long answer(long rc) { return rc < 0 ? -errno : rc; }
int io_setup(int n, void **context) { return (int)answer(syscall(SYS_io_setup, n, context)); }
int io_destroy(void *context) { return (int)answer(syscall(SYS_io_destroy, context)); }
int io_submit(void *context, long n, void **iocbs)
{
    return (int)answer(syscall(SYS_io_submit, context, n, iocbs));
}
int io_getevents(void *context, long least, long most, void *events, void *timeout)
{
    return (int)answer(syscall(SYS_io_getevents, context, least, most, events, timeout));
}
"""


@needs_compiler
def test_engine_runs_over_a_libaio_that_has_the_four_oldest_calls_only(
    tmp_path: Path,
) -> None:
    """io_pgetevents came with libaio 0.3.112; EL9 has an older one.  field case J02"""
    (tmp_path / "old.c").write_text(OLD_LIBAIO)
    library = tmp_path / "libaio.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libaio.so.1", "-o", str(library),
                    str(tmp_path / "old.c")], check=True)
    told = run_program(
        "path = folder / 'a.swp'\n"
        "path.write_bytes(bytes(65536))\n"
        "source = torch.randint(0, 256, (50_000,), dtype=torch.uint8)\n"
        "copy = torch.zeros_like(source)\n"
        "with Engine(backend='aio') as engine:\n"
        "    file = engine.open(path)\n"
        "    engine.write(file, 0, source).wait()\n"
        "    engine.read(file, 0, copy).wait()\n"
        "assert torch.equal(source, copy)\n"
        "print([line.split()[-1] for line in open('/proc/self/maps') if 'libaio' in line][0])\n",
        tmp_path, environment={"LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert told.strip() == str(library)


def test_folder_probe_tells_of_each_backend_whether_it_was_tried_and_works(tmp_path: Path) -> None:
    """What is available is found by using it, not by looking for libraries.

    field case J01: `probe_folder` is the library call behind any command that shows it
    """
    for backend in ("uring", "aio", "posix"):
        found = probe_folder(tmp_path, backend=backend)
        assert (found.backend, found.refused) == (backend, ())
    chosen = probe_folder(tmp_path)
    tried = [refusal.backend for refusal in chosen.refused] + [chosen.backend]
    assert tried == ["uring", "aio", "posix"][: len(tried)]
    assert all(refusal.reason for refusal in chosen.refused)


def test_backend_that_can_not_be_opened_is_one_error_with_cause_and_remedy() -> None:
    """A warning here, a traceback there, and no hint what to install.  field case J03"""
    with pytest.raises(SwapConfigError) as raised:
        Engine(backend="spdk")
    text = str(raised.value)
    for part in (raised.value.cause, raised.value.fix):
        assert part and part in text
    assert "uring" in (raised.value.cause or "")
    assert raised.value.__cause__ is None


def test_built_engine_passes_its_own_check(tmp_path: Path) -> None:
    """What is installed is what runs here.  field case J04"""
    assert Path(nvmeswap.__file__).parent.joinpath("_native.abi3.so").exists()
    assert probe_folder(tmp_path, backend="posix").backend == "posix"


def test_package_whose_engine_was_not_built_says_so_and_how_to_build_it() -> None:
    """"No module named _native" tells nobody what to do.  field cases J03, J04"""
    program = "import sys; sys.modules['nvmeswap._native'] = None; import nvmeswap"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True,
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and "libaio" in last and "pip install" in last, last
