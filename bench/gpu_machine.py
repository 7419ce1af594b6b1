"""Step `machine`: what the figures were measured on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import torch
from gpu_told import Options, detail, options
from machine import facts


def cufile() -> str | None:
    """Why libcufile can't be loaded; None if it can. torch brings it, or CUDA."""
    try:
        ctypes.CDLL("libcufile.so.0")
    except OSError as error:
        return str(error)
    return None


def main(given: Options) -> None:
    for name, value in facts(given.folder).items():
        detail(name, value)
    number = os.stat(given.folder).st_dev
    record = Path(f"/run/udev/data/b{os.major(number)}:{os.minor(number)}")
    detail("udev_record", record.read_text() if record.exists() else None)
    detail("cufile_missing", cufile())
    detail("free_nbytes", shutil.disk_usage(given.folder).free)
    detail("available_memory_nbytes", psutil.virtual_memory().available)
    detail("gpu_count", torch.cuda.device_count())
    if shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        detail("nvidia_smi", said.stdout.strip())


if __name__ == "__main__":
    main(options(__doc__))
