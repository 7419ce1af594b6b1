"""Errors on one rank are everybody's, others can read what was saved, and replicas write once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import nvmeswap.zero3
from tests.zero3.checkpoint_ranks import DIM, MODULE, everything, start, unequal
from tests.zero3.ranks import run_ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One launch of two ranks for all tests here; results by function."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "checkpoints").mkdir()
    return folder / "checkpoints", run_ranks(
        2, "all_of_them", folder, MODULE, checkpoints=folder / "checkpoints"
    )


def test_error_on_one_rank_is_raised_on_all_and_leaves_nothing(
    outcomes: tuple[Path, list[dict[str, Any]]],
) -> None:
    """field cases F03, F04"""
    mine, theirs = (each["one_rank_fails"]["raised"] for each in outcomes[1])
    assert mine == {
        "save, asynchronous=False": "SwapPeerError", "save, asynchronous=True": "SwapPeerError",
        "load": "SwapPeerError", "step": "SwapUsageError",  # both are torn, and know
    }
    assert theirs["load"] == "SwapReadError"
    assert theirs["save, asynchronous=False"] == "SwapChecksumError"
    assert theirs["save, asynchronous=True"] == "SwapChecksumError"
    assert outcomes[1][0]["one_rank_fails"]["left"] == [".lock", "step-00000001"]


def test_error_of_a_save_behind_training_comes_with_wait_or_with_the_next_save(
    outcomes: tuple[Path, list[dict[str, Any]]],
) -> None:
    mine, theirs = (each["async_errors_come_later"] for each in outcomes[1])
    assert mine == ["SwapPathError", "SwapPathError"]
    assert theirs == ["SwapPeerError", "SwapPeerError"]


def test_torch_alone_reads_model_and_optimizer(
    outcomes: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """(Plain FSDP2 on two ranks did in the launch.) field cases F01, F08"""
    path = nvmeswap.zero3.latest(outcomes[0] / "plain")
    assert path is not None
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert whole["model"]["embedding.weight"].shape == (13, DIM)
    assert torch.equal(whole["model"]["head.weight"], whole["model"]["embedding.weight"])
    assert whole["optimizer"]["state"]["blocks.0.up.weight"]["exp_avg"].shape == (3 * DIM + 1, DIM)
    assert "shift" not in whole["optimizer"]["state"]
    assert whole["optimizer"]["param_groups"][0]["lr"] == 1e-2


def test_export_has_the_exact_masters_or_them_rounded_and_tied_weights_once(
    outcomes: tuple[Path, list[dict[str, Any]]],
) -> None:
    """field cases E07, F08"""
    folder, (result, _) = outcomes[0], outcomes[1]
    expected = result["exports"]["expected"]
    exact = load_file(folder / "exact" / "model.safetensors")
    assert "head.weight" not in exact
    assert "scratch" not in exact
    for name, value in exact.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, expected.get(f"{name}/master", expected[name]).float()), name
    index = json.loads((folder / "rounded" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == exact.keys()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        value = load_file(folder / "rounded" / file)[name]
        assert torch.equal(value, exact[name].bfloat16()), name
    assert result["exports"]["full"] == "SwapPathError"


def test_export_of_a_part_reads_nothing_else(
    outcomes: tuple[Path, list[dict[str, Any]]],
) -> None:
    """field case N05"""
    part = load_file(outcomes[0] / "part" / "model.safetensors")
    assert part.keys() == {f"blocks.{number}.scale" for number in range(4)}
    assert [each["exports"]["read_nbytes"] for each in outcomes[1]] == [0, 0]


def test_replicas_write_each_byte_once_and_one_rank_resumes(
    one_rank: None, tmp_path: Path
) -> None:
    (kept, nbytes), *_ = run_ranks(4, "hsdp", tmp_path, MODULE, checkpoints=tmp_path)
    model, optimizer = start("bf16 beside fp32", tmp_path / "nvme", seed=1)
    nvmeswap.zero3.load(model, optimizer, tmp_path / "hsdp")
    assert unequal(everything(model, optimizer), kept) == []
    nvmeswap.zero3.save(model, optimizer, tmp_path / "alone")
    alone_nbytes = sum(each.stat().st_size for each in (tmp_path / "alone").rglob("*.distcp"))
    assert nbytes < 1.5 * alone_nbytes
    optimizer.close()
