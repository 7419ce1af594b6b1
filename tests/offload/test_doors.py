"""The names and arguments of other libraries, and the ladder of `recommend`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager
from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.offload import (
    OffloadTrainingManager,
    apply_group_offloading,
    cpu_offload,
    disk_offload,
    enable_layerwise_offload,
    manager_of,
    recommend,
    recommend_pipeline,
)
from tests.offload.blocks import Blocks
from tests.offload.runs import assert_equal, collect, frozen, infer, train, twins

LEAVES = [f"blocks.{block}.{leaf}" for block in range(3) for leaf in (0, 2)]
BLOCKS = [f"blocks.{block}" for block in range(3)]


def units(manager: OffloadManager) -> list[str]:
    return [unit.name for unit in manager.units]


def peak(manager: OffloadManager, model: nn.Module) -> int:
    """Units on the device at a time, in a second pass."""
    infer(model)
    infer(model)
    return manager.stats().peak_resident_unit_count


# --- DiffSynth-Studio -----------------------------------------------------------------------------


@pytest.mark.parametrize("trains_on_cpu", [False, True])
def test_training_manager(trains_on_cpu: bool) -> None:
    """features A24, A25, A27, A37"""
    plain, model = twins(Blocks)
    for each in (plain, model):
        each.blocks[:2].requires_grad_(False)
    manager = OffloadTrainingManager(model, "cpu", enable_optimizer_cpu_offload=trains_on_cpu)
    trained = [*LEAVES[4:], "norm"] if trains_on_cpu else []
    assert units(manager) == LEAVES[:4] + trained
    numbers = train(model, between=manager.after_backward, accumulation=2)
    assert_equal(numbers, train(plain, accumulation=2))
    manager.close()


@pytest.mark.parametrize(
    ("threshold", "expected"), [(None, LEAVES), (0.005, BLOCKS), (1, ["root"])], ids=str
)
def test_threshold_of_the_training_manager_is_in_megabytes(
    threshold: float | None, expected: list[str]
) -> None:
    """A block has 4288 bytes. features A22, A26"""
    model = frozen(Blocks())
    manager = OffloadTrainingManager(model, "cpu", cpu_offload_split_threshold=threshold)
    assert [name for name in units(manager) if name != "norm"] == expected
    manager.close()


# --- the functions --------------------------------------------------------------------------------


def test_layerwise_offload() -> None:
    plain, model = map(frozen, twins(Blocks))
    manager = enable_layerwise_offload(model, "cpu")
    assert units(manager) == [*BLOCKS, "norm"]
    assert peak(manager, model) == 2
    assert_equal(infer(model), infer(plain))
    manager.close()


@pytest.mark.parametrize(
    ("options", "expected", "most"),
    [({}, [*BLOCKS, "norm"], 1),
     ({"use_stream": True}, [*BLOCKS, "norm"], 2),
     ({"use_stream": True, "num_blocks_per_group": 2}, [*BLOCKS, "norm"], 3),
     ({"num_blocks_per_group": 2}, [*BLOCKS, "norm"], 1),
     ({"offload_type": "leaf_level"}, [*LEAVES, "norm"], 1),
     ({"block_modules": ["blocks"]}, [*BLOCKS, "norm"], 1),
     ({"block_modules": ["blocks.1"]}, [*LEAVES[:4], *LEAVES[4:], "norm"], 1),
     ({"non_blocking": True, "record_stream": True, "low_cpu_mem_usage": True,
       "exclude_kwargs": ["x"]}, [*BLOCKS, "norm"], 1)],
    ids=str,
)
def test_group_offloading(options: dict[str, Any], expected: list[str], most: int) -> None:
    plain, model = map(frozen, twins(Blocks))
    manager = apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), **options)
    assert units(manager) == expected
    assert peak(manager, model) == most
    assert_equal(infer(model), infer(plain))
    manager.close()


def test_group_offloading_to_disk(tmp_path: Path) -> None:
    plain, model = map(frozen, twins(Blocks))
    manager = apply_group_offloading(model, "cpu", offload_to_disk_path=tmp_path)
    assert list(tmp_path.rglob("*.swp"))
    assert_equal(infer(model), infer(plain))
    manager.close()


@pytest.mark.parametrize(
    "options", [{"offload_type": "layer_level"}, {"offload_device": "cuda"}], ids=str
)
def test_group_offloading_that_is_not_served_is_told(options: dict[str, Any]) -> None:
    model = Blocks()
    with pytest.raises(SwapConfigError) as raised:
        apply_group_offloading(model, "cpu", **options)
    assert raised.value.fix
    assert manager_of(model) is None


class WithBuffer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


def test_cpu_offload() -> None:
    plain, model = map(frozen, twins(WithBuffer))
    manager = cpu_offload(model, "cpu")
    assert units(manager) == [*LEAVES, "norm"]
    manager.close()
    manager = cpu_offload(model, offload_buffers=True, preload_module_classes=["Sequential"])
    assert units(manager) == ["root", *BLOCKS, "norm"]
    assert manager.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert_equal(infer(model), infer(plain))
    manager.close()
    with pytest.warns(UserWarning, match="state_dict is not used"):
        manager = cpu_offload(model, "cpu", state_dict={})
    assert_equal(infer(model), infer(plain))
    manager.close()


def test_disk_offload(tmp_path: Path) -> None:
    plain, model = map(frozen, twins(WithBuffer))
    manager = disk_offload(model, tmp_path, "cpu", preload_module_classes=["Sequential"])
    assert units(manager) == [*BLOCKS, "norm"]
    assert_equal(infer(model), infer(plain))
    manager.close()
    assert list(tmp_path.rglob("*.swp")) == []


# --- twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offload",
    [enable_layerwise_offload,
     lambda model: apply_group_offloading(model, "cpu"),
     lambda model: cpu_offload(model, "cpu"),
     lambda model: disk_offload(model, "/no/such/folder", "cpu")],
    ids=["layerwise", "group", "cpu", "disk"],
)
def test_function_returns_the_manager_that_there_is(offload: Callable[..., Any]) -> None:
    """Of a part, that of the whole. field case E04"""
    plain, model = map(frozen, twins(Blocks))
    manager = OffloadManager(model, "cpu")
    assert offload(model) is manager
    assert offload(model.blocks[0]) is manager
    assert_equal(infer(model), infer(plain))
    manager.close()
    assert manager_of(model) is None


def test_class_refuses_a_model_that_is_offloaded() -> None:
    """field case E04"""
    model = frozen(Blocks())
    manager = OffloadTrainingManager(model, "cpu")
    with pytest.raises(SwapUsageError, match="offloaded already"):
        OffloadTrainingManager(model, "cpu")
    manager.close()
    OffloadTrainingManager(model, "cpu").close()


def test_function_after_a_manager_that_is_gone() -> None:
    model = frozen(Blocks())
    part = model.blocks[0]
    enable_layerwise_offload(model, "cpu").close()
    del model
    collect()
    manager = enable_layerwise_offload(part, "cpu")
    assert manager.model is part
    manager.close()


# --- recommend ------------------------------------------------------------------------------------

TOTAL = 3 * 4288 + 128  # of Blocks, bytes
BLOCK, LEAF = 4288, 2176


def ladder(**options: Any) -> tuple[Any, Any]:
    found = recommend(frozen(Blocks()), "cpu", **options)
    arguments = found.arguments or {}
    assert found.reason
    return arguments.get("tier"), arguments.get("granularity")


@pytest.mark.parametrize(
    ("device_nbytes", "host_nbytes", "expected"),
    [(2 * TOTAL, 0, (None, None)),
     (TOTAL, 2 * TOTAL, ("cpu", "block")),
     (3 * BLOCK, 2 * TOTAL, ("cpu", "block")),
     (2 * BLOCK, 2 * TOTAL, ("cpu", "leaf")),
     (3 * BLOCK, TOTAL, ("nvme", "block")),
     (3 * LEAF, 0, ("nvme", "leaf"))],
)
def test_first_rung_that_fits_is_recommended(
    device_nbytes: int, host_nbytes: int, expected: tuple[Any, Any]
) -> None:
    assert ladder(device_nbytes=device_nbytes, host_nbytes=host_nbytes) == expected


def test_what_is_recommended_works(tmp_path: Path) -> None:
    plain, model = map(frozen, twins(Blocks))
    found = recommend(model, "cpu", path=tmp_path, device_nbytes=3 * BLOCK, host_nbytes=0)
    assert found.arguments is not None and found.arguments["path"] == tmp_path
    assert found.device_nbytes <= 3 * BLOCK
    with OffloadManager(model, "cpu", **found.arguments) as manager:
        assert_equal(infer(model), infer(plain))
        assert manager.stats().peak_resident_nbytes <= found.device_nbytes


def test_without_a_path_it_asks_for_one() -> None:
    found = recommend(Blocks(), "cpu", device_nbytes=3 * BLOCK, host_nbytes=0)
    assert "path" in found.reason


def test_memory_that_host_and_device_share_is_no_place_to_offload_to(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device_nbytes": 3 * BLOCK, "host_nbytes": 2 * TOTAL}
    found = recommend(Blocks(), "cpu", path=tmp_path, unified_memory=True, **options)
    assert (found.arguments or {})["tier"] == "nvme"
    found = recommend(Blocks(), "cpu", path=tmp_path, unified_memory=False, **options)
    assert (found.arguments or {})["tier"] == "cpu"


def pipeline() -> dict[str, nn.Module]:
    return {name: frozen(Blocks()) for name in ("text_encoder", "vae", "transformer")}


def offloaded(**options: Any) -> set[str]:
    found = recommend_pipeline(pipeline(), "cpu", host_nbytes=100 * TOTAL, **options)
    assert list(found) == ["text_encoder", "vae", "transformer"]
    return {name for name, each in found.items() if each.arguments is not None}


def test_parts_of_a_pipeline_are_offloaded_one_after_the_other() -> None:
    """The denoiser first. features C25"""
    assert offloaded(device_nbytes=4 * TOTAL) == set()
    assert offloaded(device_nbytes=3 * TOTAL) == {"transformer"}
    assert offloaded(device_nbytes=2 * TOTAL) == {"transformer", "vae"}
    assert offloaded(device_nbytes=TOTAL) == {"transformer", "vae", "text_encoder"}


def test_on_several_devices_the_denoiser_is_sharded_and_comes_last() -> None:
    sharded = recommend_pipeline(
        pipeline(), "cpu", device_count=2, device_nbytes=4 * TOTAL, host_nbytes=100 * TOTAL
    )
    assert "shard" in sharded["transformer"].reason
    assert offloaded(device_nbytes=3 * TOTAL, device_count=2) == {"vae"}
    assert offloaded(device_nbytes=TOTAL, device_count=2) == {"vae", "text_encoder"}
    everything = {"transformer", "vae", "text_encoder"}
    assert offloaded(device_nbytes=TOTAL // 2, device_count=2) == everything


def test_host_memory_is_given_out_once(tmp_path: Path) -> None:
    found = recommend_pipeline(
        pipeline(), "cpu", path=tmp_path, device_nbytes=TOTAL, host_nbytes=int(1.5 * TOTAL)
    )
    tiers = [(each.arguments or {}).get("tier") for each in found.values()]
    assert tiers == ["nvme", "nvme", "cpu"]
