"""`probe_gds` tries, and names the first thing that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvmeswap.io.gds import probe_gds
from tests.io.fake_gds.programs import Programs

PROBE = """
access = os.access
os.access = lambda path, mode: True if path == "/run/udev" else access(path, mode)
found = probe_gds(folder)
assert left() == (0, 0, 0)
assert [path.name for path in folder.iterdir()] == ["told"]
print(found.mode, found.reason)
"""


def test_folder_that_cufile_serves_is_found(fakes: Programs, tmp_path: Path) -> None:
    """Else what works is never used."""
    mode, reason = fakes.run(PROBE, tmp_path).split()
    assert mode in ("gpudirect", "compatibility") and reason == "None"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("handle=5030", "5030"),  # field case G02
        ("read=-5", "cuFileRead"),  # field case G01
        ("silent=1", "differ"),  # field case G01: success, and stale bytes
        ("driver=5007", "5007"),
        ("read=-1 errno=5", "Input/output"),
    ],
)
def test_what_cufile_refuses_is_the_reason(
    fakes: Programs, tmp_path: Path, script: str, reason: str
) -> None:
    """Else each transfer of a run fails for a reason that could have been known at its start."""
    told = fakes.run(PROBE, tmp_path, cufile=script)
    assert told.startswith("None ") and reason in told


def test_gpu_that_does_not_start_is_the_reason(fakes: Programs, tmp_path: Path) -> None:
    """field case G04"""
    assert "CUresult 100" in fakes.run(PROBE, tmp_path, cuda="init=100")


def test_missing_run_udev_is_the_reason(fakes: Programs, tmp_path: Path) -> None:
    """Else programs die in containers without it.  field case G03"""
    told = fakes.run("""
os.access = lambda path, mode: path != "/run/udev"
print(probe_gds(folder).reason)
""", tmp_path)
    assert "/run/udev" in told


@pytest.mark.skipif(torch.version.cuda is not None, reason="cuFile may be here")
def test_missing_cufile_is_the_reason(tmp_path: Path) -> None:
    """Else importing fails where there is no CUDA.  field case G04"""
    found = probe_gds(tmp_path)
    assert found.mode is None and "libcufile.so.0" in (found.reason or "")
