"""`nvmeswap-bench` on memory of a GPU. Skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nvmeswap.cli.bench.main import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("options", [[], ["--gds"]])
def test_tensors_on_a_gpu_are_measured(tmp_path: Path, options: list[str]) -> None:
    assert main(["tensors", "--path", str(tmp_path), "--count", "50", "--loops", "2", "--device",
                 "cuda", *options]) == 0


@pytest.mark.parametrize("mode", ["read", "write", "mixed"])
def test_memory_on_a_gpu_is_measured_and_told(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "io.json"
    assert main(["io", "--path", str(tmp_path), "--size", "8M", "--block", "256K", "--loops", "1",
                 "--mode", mode, "--device", "cuda", "--gds", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["backend"] == "gds" and figures["gb_per_s"] > 0
    # One pass by the clock, one block by block.
    assert figures["gpudirect_nbytes"] + figures["device_bounced_nbytes"] == 2 * (8 << 20)
    assert (figures["gds_refusal"] is None) == (figures["device_bounced_nbytes"] == 0)
    assert "by cuFile" in capsys.readouterr().out
