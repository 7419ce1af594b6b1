"""Builds `nvmeswap._native` (cffi API mode, abi3) from the C files beside this one.

setup.py refers to `ffibuilder`; `python native/build.py` builds in place for development.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "native").glob("*.c"))


def require_headers() -> None:
    """Stop with the line that mends it rather than with the compiler's. Asks with the flags that
    the build will use, since headers may lie where only those point."""
    command = shlex.split(os.environ.get("CC", "cc"))
    for flags in ("CPPFLAGS", "CFLAGS"):
        command += shlex.split(os.environ.get(flags, ""))
    if shutil.which(command[0]) is None:
        sys.exit(f"nvmeswap: no C compiler ({command[0]} not found); install: apt-get install gcc")
    missing = []
    for header, package in (("libaio.h", "libaio-dev"), ("liburing.h", "liburing-dev"),
                            ("xxhash.h", "libxxhash-dev")):
        probe = subprocess.run([*command, "-E", "-x", "c", "-"],
                               input=f"#include <{header}>\n".encode(),
                               capture_output=True, check=False)
        if probe.returncode != 0:
            missing.append((header, package))
    if missing:
        sys.exit(f"nvmeswap: {' and '.join(header for header, _ in missing)} not found; install: "
                 f"apt-get install {' '.join(package for _, package in missing)}")


def make_builder() -> FFI:
    require_headers()
    builder = FFI()
    builder.cdef((ROOT / "native" / "interface.h").read_text())
    builder.set_source(
        "nvmeswap._native",
        '#include <stddef.h>\n#include <stdint.h>\n#include "interface.h"\n',
        # setuptools wants these relative to setup.py.
        sources=[str(path.relative_to(ROOT)) for path in SOURCES],
        include_dirs=["native"],
        libraries=["aio", "uring", "pthread", "dl"],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter",
                            "-fvisibility=hidden", "-UNDEBUG"],
        py_limited_api=True,
    )
    return builder


if __name__ == "__main__":
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    sys.exit(subprocess.call(command, cwd=ROOT))

ffibuilder = make_builder()
