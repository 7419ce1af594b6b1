"""A wrong configuration gives its own clear error, before a model is touched."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeswap.zero3
from nvmeswap.config import Config, OffloadDevice, SameDriveWarning
from nvmeswap.errors import SwapBudgetError, SwapConfigError, SwapPathError


def config(nvme_path: Path | None, **zero: Any) -> dict[str, Any]:
    place: dict[str, Any] = {"device": "nvme"}
    if nvme_path is not None:
        place["nvme_path"] = str(nvme_path)
    return {
        "zero_optimization": {
            "stage": 3, "offload_param": dict(place), "offload_optimizer": dict(place), **zero
        }
    }


def error_of(source: Any) -> SwapConfigError:
    with pytest.raises(SwapConfigError) as raised:
        Config.load(source)
    error = raised.value
    assert error.fix, "each error says what to do"
    return error


@pytest.mark.parametrize("value", ["missing", None, "", "auto"])
def test_nvme_without_a_path_names_the_key(value: str | None) -> None:
    """field case M01"""
    wrong = config(None)
    if value != "missing":
        wrong["zero_optimization"]["offload_param"]["nvme_path"] = value
    error = error_of(wrong)
    assert error.key == "zero_optimization.offload_param.nvme_path"
    assert "missing" in error.what


def test_missing_folder_file_and_missing_permission_differ(tmp_path: Path) -> None:
    """field cases M01, M02"""
    missing = error_of(config(tmp_path / "missing"))
    file = tmp_path / "file"
    file.touch()
    not_a_folder = error_of(config(file))
    assert isinstance(missing, SwapPathError) and isinstance(not_a_folder, SwapPathError)
    assert missing.path == tmp_path / "missing" and not_a_folder.path == file
    assert missing.what != not_a_folder.what


def test_folder_without_permission_names_path_uid_and_mode(tmp_path: Path) -> None:
    """Root may write anywhere, so somebody else has to ask.  field case M02"""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.getuid() and len(parent.parts) > 2:
            parent.chmod(0o755)
    code = (
        "import os, sys\n"
        "from nvmeswap.config import Config\n"
        "from nvmeswap.errors import SwapPathError\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: Config.load(__import__('json').loads(sys.argv[1]))\n"
        "except SwapPathError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(config(folder))], capture_output=True, text=True
    )
    assert str(folder) in done.stdout and "uid" in done.stdout and "mode 0o500" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("block", "typo", "meant"),
    [
        ("offload_param", "bufer_count", "buffer_count"),
        ("offload_optimizer", "nvme_pth", "nvme_path"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, block: str, typo: str, meant: str) -> None:
    """field case M07"""
    wrong = config(tmp_path)
    wrong["zero_optimization"][block][typo] = 3
    error = error_of(wrong)
    assert error.key == f"zero_optimization.{block}.{typo}"
    assert meant in (error.fix or "")


def test_unknown_outermost_section_warns_unless_it_looks_like_a_typo(tmp_path: Path) -> None:
    """Other tools keep their sections in the same JSON.  field case M07"""
    with pytest.warns(UserWarning, match="wandb"):
        Config.load({**config(tmp_path), "wandb": {"enabled": True}})
    assert error_of({**config(tmp_path), "zero_optimisation": {}}).key == "zero_optimisation"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offload_param_below_stage_3_is_refused(tmp_path: Path, stage: int) -> None:
    """Elsewhere it is ignored in silence."""
    error = error_of(config(tmp_path, stage=stage))
    assert error.key == "zero_optimization.offload_param"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}, "gradient_clipping"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"aio": {"block_size": 1000}}, "aio.block_size"),
        ({"aio": "fast"}, "aio"),
        ({"nvmeswap": {"backend": "spdk"}}, "nvmeswap.backend"),
    ],
)
def test_known_key_that_is_not_served_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    """A setting without effect would be worse than an error."""
    assert error_of({**config(tmp_path), **change}).key == key


@pytest.mark.parametrize("device", ["disk", 3, ["nvme"]])
def test_wrong_device_is_refused(tmp_path: Path, device: Any) -> None:
    wrong = config(tmp_path)
    wrong["zero_optimization"]["offload_param"]["device"] = device
    assert error_of(wrong).key == "zero_optimization.offload_param.device"


def test_offloaded_parameters_without_offloaded_optimizer_are_refused(tmp_path: Path) -> None:
    wrong = config(tmp_path)
    del wrong["zero_optimization"]["offload_optimizer"]
    assert error_of(wrong).key == "zero_optimization.offload_optimizer.device"


@pytest.mark.parametrize("value", [None, "auto"])
def test_every_optional_key_takes_null_and_auto(tmp_path: Path, value: str | None) -> None:
    """Integrations leave keys open; the defaults come from one place.  field case M04"""
    given = config(tmp_path)
    plain = Config.load(copy.deepcopy(given))
    for name in ("offload_param", "offload_optimizer"):
        block = given["zero_optimization"][name]
        fields = type(getattr(plain.zero_optimization, name)).model_fields
        for key in fields:
            block.setdefault(key, value)
    given["zero_optimization"]["sub_group_size"] = value
    given["aio"] = dict.fromkeys(["block_size", "queue_depth", "intra_op_parallelism"], value)
    given["optimizer"] = value
    given["bf16"] = {"enabled": value}
    given["gradient_clipping"] = value
    assert Config.load(given) == plain


def test_deepspeed_example_is_accepted_from_a_file(tmp_path: Path) -> None:
    """The JSON of a DeepSpeed user works as it is."""
    text = """{
      "train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto",
      "gradient_accumulation_steps": 1, "steps_per_print": 2000, "wall_clock_breakdown": false,
      "bf16": {"enabled": true},
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
      "zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": true, "pipeline_read": true},
        "offload_param": {"device": "nvme", "pin_memory": true, "nvme_path": "PATH",
                          "max_in_cpu": 1e9, "buffer_count": 5, "buffer_size": 1e8}
      },
      "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": false,
              "overlap_events": true, "intra_op_parallelism": 1}
    }"""
    path = tmp_path / "ds_config.json"
    path.write_text(text.replace("PATH", str(tmp_path)))
    loaded = Config.load(path)
    assert loaded.zero_optimization.offload_param.device is OffloadDevice.NVME
    assert loaded.zero_optimization.offload_param.max_in_cpu == 10**9
    assert loaded.aio.queue_depth == 8


def test_old_spelling_of_the_thread_count_is_taken_with_a_warning(tmp_path: Path) -> None:
    for old in ("thread_count", "num_threads"):
        with pytest.warns(UserWarning, match="intra_op_parallelism"):
            loaded = Config.load({**config(tmp_path), "aio": {old: 7}})
        assert loaded.aio.intra_op_parallelism == 7


def test_unreadable_configuration_says_so(tmp_path: Path) -> None:
    assert isinstance(error_of(tmp_path / "missing.json"), SwapPathError)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert error_of(broken).path == broken
    broken.write_text("[]")
    assert error_of(broken).path == broken


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        (("Muon", {}), "optimizer.type"),
        (("AdamW", {"lr": 1e-3, "momentum": 0.9}), "optimizer.params.momentum"),
    ],
)
def test_optimizer_that_is_not_served_is_refused_by_name(
    tmp_path: Path, optimizer: tuple[str, dict[str, Any]], key: str
) -> None:
    kind, params = optimizer
    with pytest.raises(SwapConfigError) as raised:
        nvmeswap.zero3.shard(
            torch.nn.Linear(2, 2),
            {**config(tmp_path), "optimizer": {"type": kind, "params": params}},
        )
    assert raised.value.key == key


def test_budget_that_can_not_work_is_refused_with_the_smallest_that_does(tmp_path: Path) -> None:
    """field cases B01, P01: and with the smallest it does run"""

    def attempt(budget_nbytes: int) -> Any:
        return nvmeswap.zero3.shard(
            torch.nn.Sequential(torch.nn.Linear(512, 1000), torch.nn.Linear(1000, 64)),
            {**config(tmp_path), "nvmeswap": {"host_memory_nbytes": budget_nbytes}},
        )

    with pytest.raises(SwapBudgetError) as raised:
        attempt(100_000)
    assert list(tmp_path.iterdir()) == []
    smallest = raised.value.smallest_nbytes
    with pytest.raises(SwapBudgetError):
        attempt(smallest - 1)
    model, optimizer = attempt(smallest)
    for _ in range(2):
        model(torch.ones(3, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.swap.stats().arena_nbytes <= smallest
    optimizer.swap.close()


def test_several_folders_are_taken_in_their_order(tmp_path: Path) -> None:
    """Else a second drive can't be used."""
    folders = [tmp_path / "b", tmp_path / "a"]
    for folder in folders:
        folder.mkdir()
    source = config(None)
    for block in ("offload_param", "offload_optimizer"):
        source["zero_optimization"][block]["nvme_path"] = [str(folder) for folder in folders]
    with pytest.warns(SameDriveWarning) as warned:
        loaded = Config.load(source)
    assert loaded.nvme_paths == tuple(folders)
    assert all(str(folder) in str(warned[0].message) for folder in folders)
    source["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folders[0])
    with pytest.warns(SameDriveWarning):
        assert error_of(source).key == "zero_optimization.offload_optimizer.nvme_path"


def test_wrong_folder_among_several_is_named(tmp_path: Path) -> None:
    """Else nobody knows which of the drives isn't mounted.  field case M02"""
    key = "zero_optimization.offload_param.nvme_path"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for second, path in (("missing", tmp_path / "missing"), ("link", link)):
        source = config(None)
        places = [str(tmp_path), str(tmp_path / second)]
        source["zero_optimization"]["offload_param"]["nvme_path"] = places
        error = error_of(source)
        assert (error.key, error.path) == (key, path)
    source["zero_optimization"]["offload_param"]["nvme_path"] = [str(tmp_path), 5]
    assert error_of(source).key == f"{key}.1"
    source["zero_optimization"]["offload_param"]["nvme_path"] = []
    assert error_of(source).key == key
