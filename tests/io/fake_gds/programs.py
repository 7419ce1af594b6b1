"""Programs over a CUDA driver and a cuFile that need no GPU: see cuda.c and cufile.c.

"Device" memory of theirs can't be touched but by their copies, as on a GPU. It is named by tensors
of the CPU all the same, which nobody looks into.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nvmeswap.errors import SwapError
from nvmeswap.io import Engine
from nvmeswap.io.cuda_driver import DeviceMemory
from nvmeswap.io.gds import probe_gds
from nvmeswap.swap.tensors import TensorSwapper

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT_S = 120


class Programs:
    """Runs each in a process of its own, forked from one that has imported torch already."""

    def __init__(self, server: subprocess.Popen[str], cuda: str, cufile: str) -> None:
        self._server = server
        self._cuda = cuda
        self._cufile = cufile

    def run(self, program: str, folder: Path, *, cuda: str = "", cufile: str | None = "") -> str:
        """What the program prints; `cuda` and `cufile` are the fakes' scripts (None: there is no
        cuFile). Fails with what the program says when it fails."""
        assert self._server.stdin and self._server.stdout
        task = {
            "program": program, "folder": str(folder), "FAKE_CUDA": cuda,
            "FAKE_CUFILE": cufile or "",
            "libraries": [self._cuda] if cufile is None else [self._cuda, self._cufile],
        }
        print(json.dumps(task), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline())
        assert answer["status"] == 0, answer["told"] or answer["status"]
        return str(answer["told"])


@contextmanager
def programs_over_fakes(folder: Path) -> Iterator[Programs]:
    """Builds the fakes in the folder. Skips without a compiler, or with the real libraries."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has loaded the real libraries")
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    libraries: list[str] = []
    for name, source in (("libcuda.so.1", "cuda.c"), ("libcufile.so.0", "cufile.c")):
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror",
                   f"-Wl,-soname,{name}", str(HERE / source), *libraries, "-o", str(folder / name)]
        subprocess.run(command, check=True)
        libraries.append(str(folder / name))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.io.fake_gds.programs"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as server:
        try:
            yield Programs(server, *libraries)
        finally:
            server.kill()


# --- in the server -------------------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        task = json.loads(line)
        told = Path(task["folder"]) / "told"
        pid = os.fork()
        if pid == 0:
            os._exit(_run(task, told))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": status, "told": told.read_text()}), flush=True)


def _run(task: dict[str, Any], told: Path) -> int:
    with told.open("w") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    os.environ |= {name: task[name] for name in ("FAKE_CUDA", "FAKE_CUFILE")}
    for name in task["libraries"]:
        ctypes.CDLL(name)  # whoever asks for it by its name alone gets this one
    names = globals() | {"folder": Path(task["folder"]), "library": ctypes.CDLL}
    try:
        exec(task["program"], names)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def device_tensor(memory: DeviceMemory) -> torch.Tensor:
    address = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    return torch.frombuffer(address, dtype=torch.uint8)


def sized(path: Path, nbytes: int) -> Path:
    path.touch()
    os.truncate(path, nbytes)
    return path


def file_bytes(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as opened:
        return os.pread(opened.fileno(), nbytes, offset)


def left() -> tuple[int, int, int]:
    """Streams, page-locked blocks and contexts that have not been given back."""
    cuda = ctypes.CDLL("libcuda.so.1")
    return cuda.fake_cuda_streams(), cuda.fake_cuda_pinned(), cuda.fake_cuda_retained()


FOR_PROGRAMS = (DeviceMemory, Engine, SwapError, TensorSwapper, probe_gds)  # by their names
if __name__ == "__main__":
    serve()
