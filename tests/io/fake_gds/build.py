"""Programs over a CUDA driver and a cuFile that need no GPU: see cuda.c and cufile.c.

"Device" memory of theirs can't be touched but by their copies, as on a GPU. It is named by tensors
of the CPU all the same, which nobody looks into.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PRELUDE = """
import ctypes, os, sys
from pathlib import Path
import torch
from nvmeswap.errors import *
from nvmeswap.io import DirectMode, Engine
from nvmeswap.io.cuda_driver import DeviceMemory
folder = Path(sys.argv[1])

def device_tensor(memory):
    return torch.frombuffer((ctypes.c_uint8 * memory.nbytes).from_address(memory.address),
                            dtype=torch.uint8)

def sized(name, nbytes):
    path = folder / name
    path.touch()
    os.truncate(path, nbytes)
    return path

def library(name):
    return ctypes.CDLL(name)
"""


def build_fakes(folder: Path, *, cuda: bool = True, cufile: bool = True) -> Path:
    """The folder that LD_LIBRARY_PATH is to name; without a compiler the test is skipped."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    for wanted, name, source, needs in (
        (cuda, "libcuda.so.1", "cuda.c", ()),
        (cufile, "libcufile.so.0", "cufile.c", ("-l:libcuda.so.1",)),
    ):
        if wanted:
            command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror",
                       f"-Wl,-soname,{name}", str(HERE / source), f"-L{folder}", *needs,
                       "-o", str(folder / name)]
            subprocess.run(command, check=True)
    return folder


def run_with(
    libraries: Path, program: str, folder: Path, *, cuda: str = "", cufile: str = ""
) -> str:
    """Runs the program, in a process whose FAKE_CUDA and FAKE_CUFILE are these scripts, and
    returns what it prints. Fails with what it says when it fails."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "FAKE_CUDA": cuda,
                   "FAKE_CUFILE": cufile, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PRELUDE + program, str(folder)],
                          env=environment, capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr or f"ended with {done.returncode}"
    return done.stdout
