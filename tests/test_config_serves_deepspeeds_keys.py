"""Every key of DeepSpeed's offload blocks is honoured, refused with the reason, or told to have no
effect and why."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.config import Config, Nbytes, OffloadDevice, elements
from nvmeswap.errors import SwapConfigError

# A plan of DeepSpeed's documents: parameters on NVMe, optimizer state in host memory.
PARAMS_ON_NVME = """{
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "nvme", "pin_memory": true, "nvme_path": "/local_nvme",
                      "max_in_cpu": 1e9, "buffer_count": 5}
  }
}"""
# As integrations write it: half of it is left open.
OPEN = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
           "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                            "weight_decay": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
                          "buffer_count": 4, "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
                      "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
  },
  "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false,
          "overlap_events": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
}"""
# Optimizer state alone, at stage 2, in fp16.
STAGE_2 = """{
  "train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                           "weight_decay": 3e-7}},
  "fp16": {"enabled": true, "auto_cast": true, "loss_scale": 0.0, "initial_scale_power": 12,
           "loss_scale_window": 500, "hysteresis": 2, "consecutive_hysteresis": false,
           "min_loss_scale": 1},
  "zero_optimization": {
    "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
    "allgather_partitions": true, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8
  }
}"""
# Everything pipelined on NVMe, with what DeepSpeed's tuner prints, booleans as text included.
TUNED = """{
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "sub_group_size": 1e8, "round_robin_gradients": false,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": false,
                          "buffer_count": 4, "pipeline_read": true, "pipeline_write": true,
                          "ratio": 0.5, "cpuadam_cores_perc": 0.8, "super_offload": false},
    "offload_param": {"device": "cpu", "pin_memory": false}
  },
  "aio": {"single_submit": "false", "overlap_events": "true", "num_threads": 8,
          "queue_depth": 32, "block_size": 1048576, "use_gds": false}
}"""


def load(text: str, nvme_path: Path) -> Config:
    return Config.load(json.loads(text.replace("/local_nvme", str(nvme_path))))


@pytest.mark.parametrize("text", [PARAMS_ON_NVME, OPEN, STAGE_2, TUNED])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_json_of_a_deepspeed_user_loads(tmp_path: Path, text: str) -> None:
    """It works as it is: that is what a drop-in means.  field cases M04, M07"""
    assert load(text, tmp_path).zero_optimization.stage in (2, 3)


def test_what_such_a_json_says_is_what_is_done(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(PARAMS_ON_NVME, tmp_path)
    param = loaded.zero_optimization.offload_param
    assert (param.device, param.max_in_cpu, param.buffer_count) == (OffloadDevice.NVME, 10**9, 5)
    with pytest.warns(UserWarning, match="bucket_size"):
        stage_2 = load(STAGE_2, tmp_path)
    assert (stage_2.gradient_clipping, stage_2.fp16.initial_scale_power) == (1.0, 12)
    with pytest.warns(UserWarning, match="num_threads") as told:
        tuned = load(TUNED, tmp_path)
    assert not any("pipeline" in str(each.message) for each in told), "it is honoured"
    optimizer = tuned.zero_optimization.offload_optimizer
    assert (optimizer.ratio, optimizer.cpuadam_cores_perc) == (0.5, 0.8)
    assert not optimizer.pin_memory and tuned.aio.intra_op_parallelism == 8


def nvme(tmp_path: Path, block: str, **keys: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero: dict[str, Any] = {
        "stage": 3, "offload_param": dict(place), "offload_optimizer": dict(place)
    }
    config: dict[str, Any] = {"zero_optimization": zero}
    inside = config if block in ("aio", "fp16", "bf16", "nvmeswap") else zero
    if block == "zero_optimization":
        zero |= keys
    else:
        inside[block] = {**inside.get(block, {}), **keys}
    return config


@pytest.mark.parametrize(
    ("block", "keys", "reason"),
    [
        ("offload_optimizer", {"pipeline_read": False}, "buffer_count"),
        ("offload_optimizer", {"pipeline_write": False}, "buffer_count"),
        ("offload_optimizer", {"fast_init": True}, "only way"),
        ("zero_optimization", {"stage3_max_live_parameters": 1e9}, "keep_resident_bytes"),
        ("zero_optimization", {"overlap_comm": False}, "FSDP2"),
        ("aio", {"single_submit": True}, "several at a time"),
        ("aio", {"overlap_events": "false"}, "always"),
        ("bf16", {"loss_scale": 128}, "range of fp32"),
        ("fp16", {"auto_cast": False}, "casts"),
        ("nvmeswap", {"keep_resident_bytes": "1GiB"}, "no parameter is offloaded"),
    ],
)
def test_key_without_effect_is_told_with_the_reason(
    tmp_path: Path, block: str, keys: Mapping[str, Any], reason: str
) -> None:
    """Else a user tunes a knob that is not connected.  field case M07"""
    config = nvme(tmp_path, block, **keys)
    if block == "nvmeswap":
        del config["zero_optimization"]["offload_param"]
    (key,) = keys
    with pytest.warns(UserWarning, match=key) as told:
        Config.load(config)
    assert reason in str(told[0].message)


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        ("offload_optimizer", {"pipeline_read": True, "pipeline_write": True, "fast_init": False}),
        ("zero_optimization", {"overlap_comm": True, "contiguous_gradients": None}),
        ("zero_optimization", {"zenflow": None, "mics_shard_size": -1}),
        ("zero_optimization", {"reduce_bucket_size": "auto"}),
        ("offload_optimizer", {"super_offload": False, "ratio": 1.0}),
        ("aio", {"single_submit": False, "overlap_events": "true", "use_gds": False}),
        ("fp16", {"loss_scale": 0, "hysteresis": 2}),
    ],
)
def test_what_is_done_anyway_needs_no_warning(
    tmp_path: Path, block: str, keys: Mapping[str, Any]
) -> None:
    """Warnings that mean nothing hide those that do."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.load(nvme(tmp_path, block, **keys))


@pytest.mark.parametrize(
    ("block", "key", "value"),
    [
        ("offload_optimizer", "super_offload", True),
        ("zero_optimization", "zenflow", {"topk_ratio": 0.05}),
        ("offload_optimizer", "zenflow", True),
    ],
)
def test_overlapping_optimizers_of_deepspeed_name_ours(
    tmp_path: Path, block: str, key: str, value: Any
) -> None:
    """They hide the optimizer behind the GPU's work; so does overlap_step."""
    with pytest.raises(SwapConfigError) as raised:
        Config.load(nvme(tmp_path, block, **{key: value}))
    assert (raised.value.key or "").endswith(key) and "overlap_step" in (raised.value.fix or "")
    assert Config.load(nvme(tmp_path, "nvmeswap", overlap_step=True)).nvmeswap.overlap_step


@pytest.mark.parametrize("asks", [{"gradient_clipping": 1.0}, {"fp16": {"enabled": True}}])
def test_overlap_with_what_needs_all_gradients_is_refused(
    tmp_path: Path, asks: dict[str, Any]
) -> None:
    """Parameters would be updated with gradients that were not clipped, or still scaled."""
    with pytest.raises(SwapConfigError) as raised:
        Config.load({**nvme(tmp_path, "nvmeswap", overlap_step=True), **asks})
    assert raised.value.key == "nvmeswap.overlap_step"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (1e9, 10**9),
        (7, 7),
        ("1e6", 10**6),
        ("8GiB", Nbytes(8 << 30)),
        ("512 mib", Nbytes(512 << 20)),
        ("1.5GB", Nbytes(1_500_000_000)),
        ("10B", Nbytes(10)),
    ],
)
def test_max_in_cpu_is_elements_or_bytes(
    tmp_path: Path, given: Any, meant: int | Nbytes
) -> None:
    """DeepSpeed counts elements; a person knows bytes."""
    loaded = Config.load(nvme(tmp_path, "offload_param", max_in_cpu=given))
    assert loaded.zero_optimization.offload_param.max_in_cpu == meant
    assert elements(Nbytes(10), itemsize=4) == 2 and elements(10, itemsize=4) == 10


@pytest.mark.parametrize("key", ["host_memory_nbytes", "keep_resident_bytes", "min_swap_nbytes"])
def test_amounts_of_memory_take_a_unit(tmp_path: Path, key: str) -> None:
    for given, nbytes in (("8GiB", 8 << 30), (1e6, 10**6), ("3kB", 3000), (12, 12)):
        loaded = Config.load(nvme(tmp_path, "nvmeswap", **{key: given}))
        assert getattr(loaded.nvmeswap, key) == nbytes


@pytest.mark.parametrize("wrong", ["8G", "GiB", "-1GiB", "much", -1, 1.5, True, [1]])
@pytest.mark.parametrize("place", ["offload_param.max_in_cpu", "nvmeswap.host_memory_nbytes"])
def test_amount_that_is_none_names_its_place(tmp_path: Path, wrong: Any, place: str) -> None:
    """8G could be either; what can't be told is not guessed."""
    block, key = place.split(".")
    with pytest.raises(SwapConfigError) as raised:
        Config.load(nvme(tmp_path, block, **{key: wrong}))
    assert (raised.value.key or "").endswith(place)


@pytest.mark.parametrize("value", [None, "auto"])
@pytest.mark.parametrize("block", ["aio", "fp16", "bf16", "nvmeswap", "offload_optimizer"])
def test_null_and_auto_mean_the_default_everywhere(
    tmp_path: Path, block: str, value: str | None
) -> None:
    """field case M04"""
    plain = Config.load(nvme(tmp_path, "zero_optimization"))
    zero = plain.zero_optimization
    owner = zero if block.startswith("offload") else plain
    fields = type(getattr(owner, block)).model_fields
    keys = {key: value for key in fields if key not in ("device", "nvme_path")}
    assert Config.load(nvme(tmp_path, block, **keys)) == plain
    if not block.startswith("offload"):
        assert Config.load({**nvme(tmp_path, "zero_optimization"), block: value}) == plain


@pytest.mark.parametrize("stage", [1, 2])
def test_lower_stages_take_an_optimizer_but_no_parameters(tmp_path: Path, stage: int) -> None:
    """Elsewhere offload_param is ignored there without a word."""
    config = nvme(tmp_path, "zero_optimization", stage=stage)
    with pytest.raises(SwapConfigError, match="not sharded") as raised:
        Config.load(config)
    assert raised.value.key == "zero_optimization.offload_param"
    config["zero_optimization"]["offload_param"] = {"device": "none"}
    assert Config.load(config).zero_optimization.stage == stage
