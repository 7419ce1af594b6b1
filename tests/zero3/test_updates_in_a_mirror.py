"""Sharded training whose updates are made as on a GPU, on the CPU: in a mirror of each slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nvmeswap.config import Config
from nvmeswap.swap.update_place import UpdatePlace
from nvmeswap.zero3.agreement import Agreement
from nvmeswap.zero3.build import swap_shards
from nvmeswap.zero3.materialise import FirstValues
from tests.oracle import Run, first_difference
from tests.zero3.cases import LEARNING_RATE, Case, build, run_in_ram, shard_in_ram, train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(bf16=True, clip=True, accumulation=3),
        Case(params="none", clip=True),
        Case(bf16=True, params="cpu", optimizer="cpu", max_in_cpu=7000),
    ],
    ids=str,
)
def test_sharded_run_equals_ram(one_rank: None, tmp_path: Path, case: Case) -> None:
    """Halves of masters lie in the slot, or are the parameter itself; gradients are on the host."""
    difference = first_difference(run_mirrored(case, tmp_path), run_in_ram(case))
    assert difference is None, difference


def run_mirrored(case: Case, nvme_path: Path) -> Run:
    config = Config.load(case.config(nvme_path))
    block = config.nvmeswap.model_copy(update={"update_device": UpdatePlace(CPU, is_mirrored=True)})
    model = build(case)
    shard_in_ram(model, bf16=case.bf16)
    optimizer = swap_shards(
        model, config.model_copy(update={"nvmeswap": block}), run="mirrored",
        agreement=Agreement(None, CPU), cls=torch.optim.AdamW,
        options={"lr": LEARNING_RATE}, values=FirstValues(),
    )
    try:
        return train(model, optimizer, case)
    finally:
        optimizer.swap.close()
