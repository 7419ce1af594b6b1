"""A kernel and a C library that say no: seccomp filters, and libraries that stand before libaio's.

Programs run in processes of their own, with `forbid` and `folder` at hand and nvmeswap imported.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

_LIMIT_S = 60
ROOT = Path(__file__).parents[2]

# System call numbers are x86-64's and differ elsewhere, but for io_uring_setup.
IO_SETUP, FALLOCATE, IO_URING_SETUP = 206, 285, 425

# As Docker's profile does it. Each line of the filter is code, jump if true, jump if false, value:
# load the number; for each call: if it is not equal skip one, return the errno; return allow.
_PRELUDE = """
import ctypes, errno, os, struct, sys, warnings
from pathlib import Path
import torch
from nvmeswap import TensorSwapper
from nvmeswap.io import Engine, probe_folder

def forbid(code, *calls):
    lines = [(0x20, 0, 0, 0)]
    for call in calls:
        lines += [(0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | code)]
    lines.append((0x06, 0, 0, 0x7fff0000))
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

folder = Path(sys.argv[1])
"""

needs_x86_64 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="system call numbers are x86-64's"
)


def run_program(
    program: str, folder: Path, *, environment: Mapping[str, str] | None = None
) -> str:
    """What the program printed; its failure is the test's. In a forked child, which is quick, or in
    a new process with these variables in its environment."""
    if environment is None:
        return _run_forked(program, folder)
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + program, str(folder)], capture_output=True, text=True,
        timeout=_LIMIT_S, check=False, cwd=ROOT, env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_forked(program: str, folder: Path) -> str:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(_LIMIT_S)
                torch.set_num_threads(1)  # its threads stayed with the parent
                sys.stdout = sys.stderr = said
                sys.argv = ["-c", str(folder)]
                exec(compile(_PRELUDE + program, "<program>", "exec"), {})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                said.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read()
    assert status == 0, f"{status}: {text}"
    return text


# What stands before libaio's functions calls the kernel itself: `kernel` answers as they do.
_BEFORE = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#define kernel(...) kernel_answer(syscall(__VA_ARGS__))
static inline long kernel_answer(long answer) { return answer < 0 ? -errno : answer; }
"""


def build_preload(folder: Path, source: str) -> Path:
    """A shared library from C; skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a library that stands before another")
    path = folder / "before.c"
    path.write_text(_BEFORE + source)
    library = folder / "before.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library
