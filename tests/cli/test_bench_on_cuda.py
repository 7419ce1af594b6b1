"""`nvmeswap-bench` on memory of a GPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvmeswap.cli.bench.main import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("options", [[], ["--gds"]])
def test_tensors_on_a_gpu_are_measured(tmp_path: Path, options: list[str]) -> None:
    assert main(["tensors", "--path", str(tmp_path), "--count", "50", "--loops", "2", "--device",
                 "cuda", *options]) == 0
