"""Sharded training on a GPU whose updates are made there: bit for bit FSDP2 and torch's AdamW."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.oracle import first_difference
from tests.zero3.cases import Case, run_in_ram, run_swapped

ROOT = Path(__file__).resolve().parents[2]
CUDA = {"min_swap_nbytes": 1000, "update_device": "cuda"}
CASES = [
    Case(device="cuda", extra={"nvmeswap": CUDA}),
    Case(device="cuda", bf16=True, accumulation=3, extra={"nvmeswap": CUDA}),
    Case(device="cuda", bf16=True, checkpointing=True, params="cpu", extra={"nvmeswap": CUDA}),
    Case(device="cuda", params="none", extra={"nvmeswap": CUDA}),
    Case(device="cuda", bf16=True, params="none", optimizer="cpu", extra={"nvmeswap": CUDA}),
    Case(device="cuda", bf16=True, extra={"nvmeswap": {**CUDA, "overlap_step": True}}),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_run_on_one_gpu_equals_ram(tmp_path: Path, number: int) -> None:
    """Halves of masters in the slot, or parameters in place; gradients come from the host. (In a
    process of its own: another test may have made a group without NCCL.)"""
    subprocess.run(
        [sys.executable, "-c", "import sys; from pathlib import Path\n"
         f"from {__name__} import compare\ncompare(int(sys.argv[1]), Path(sys.argv[2]))",
         str(number), str(tmp_path)],
        check=True, cwd=ROOT, timeout=300,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )


def compare(number: int, nvme_path: Path) -> None:
    """Run by the test above."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    case = CASES[number]
    difference = first_difference(run_swapped(case, nvme_path), run_in_ram(case))
    assert difference is None, difference
    dist.destroy_process_group()
