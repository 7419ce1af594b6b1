"""`nvmeswap plan`: models of every kind, bytes, phases, limits, wear."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from nvmeswap.cli.main import main
from nvmeswap.cli.plan.passes import Compute, play
from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.cli.plan.stepping import step
from nvmeswap.cli.plan.wear import Rating, wear
from nvmeswap.config import Config
from nvmeswap.zero3.foresight import Footprint, Foresight

Plan = Callable[..., dict[str, Any]]
DIM, LAYERS = 64, 6
RATES = {
    "drives": {"read_nbytes_per_s": 2e9, "write_nbytes_per_s": 1e9, "mixed_nbytes_per_s": 1.3e9},
    "host": {"update_numel_per_s": 1e9, "digest_nbytes_per_s": 1e10},
}
GIVEN = ("--bench", "before.json", "--compute-forward-s", "0.001", "--compute-backward-s", "0.002")


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A plan pretends a group of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.head(x)
        return result


def model() -> nn.Module:
    return Model()


def batch() -> torch.Tensor:
    return torch.randn(2, DIM)


def config(**nvmeswap: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": "/elsewhere"}
    return {
        "zero_optimization": {
            "stage": 3, "sub_group_size": 20_000,
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 2},
            "offload_optimizer": {**nvme, "buffer_count": 2},
        },
        "bf16": {"enabled": True},
        "nvmeswap": {"min_swap_nbytes": 1000, **nvmeswap},
    }


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Its JSON, of the factory's model unless arguments name another; `before.json` has rates."""
    monkeypatch.chdir(tmp_path)
    Path("before.json").write_text(json.dumps({"rates": RATES}))

    def run(*arguments: str, code: int = 0, raw: dict[str, Any] | None = None) -> dict[str, Any]:
        settings, out = tmp_path / "ds.json", tmp_path / "plan.json"
        settings.write_text(json.dumps(raw or config()))
        models = ("--transformers", "--shapes", "--safetensors", "--factory")
        if not any(each in arguments for each in models):
            arguments = ("--factory", f"{__name__}:model", *arguments)
        assert main(["plan", "--config", str(settings), "--json", str(out), *arguments]) == code
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    return run


def shapes() -> dict[str, dict[str, Any]]:
    with torch.device("meta"):
        named = model().named_parameters()
    return {name: {"shape": list(value.shape), "dtype": "fp32"} for name, value in named}


def test_all_descriptions_of_a_model_give_one_plan(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(shapes()))
    save_file({name: value.detach() for name, value in model().named_parameters()},
              tmp_path / "model.safetensors")
    one = plan(*GIVEN)
    other = plan(*GIVEN, "--shapes", str(tmp_path / "shapes.json"))
    third = plan(*GIVEN, "--safetensors", str(tmp_path / "model.safetensors"))
    assert one["model"] == other["model"] == third["model"]
    assert one["bytes"] == other["bytes"] == third["bytes"]


def test_transformers_config_is_planned(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    }))
    found = plan(*GIVEN, "--transformers", str(tmp_path))
    assert found["model"]["rank_numel"] > 2 * 100 * 64
    # field case E03: three different parameters on meta are three
    assert found["bytes"]["nvme"]["params.swp"] >= 2 * (4 * 64 * 64 + 3 * 64 * 128)


def test_frozen_parameters_have_no_state(plan: Plan, tmp_path: Path) -> None:
    frozen = {name: {**facts, "trained": name.startswith("head")}
              for name, facts in shapes().items()}
    (tmp_path / "shapes.json").write_text(json.dumps(frozen))
    found = plan(*GIVEN, "--shapes", str(tmp_path / "shapes.json"))
    assert found["model"]["rank_trained_numel"] == 10 * DIM + 10
    assert found["phases"]["step"]["write_nbytes"] < 13 * (10 * DIM + 10) + 20_000


@pytest.mark.parametrize("facts", [
    {"shape": [4], "dtype": "fp7"}, {"shape": [4], "dtype": "int8"}, {"shape": "4"}, [], {},
])
def test_what_can_not_be_trained_is_an_error_when_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: Any
) -> None:
    # field case E02
    (tmp_path / "shapes.json").write_text(json.dumps({"a.weight": facts}))
    (tmp_path / "ds.json").write_text(json.dumps(config()))
    assert main(["plan", "--config", str(tmp_path / "ds.json"), *GIVEN,
                 "--shapes", str(tmp_path / "shapes.json")]) == 1
    assert "fix" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["--transformers", "/missing"], ["--safetensors", "/missing"], ["--shapes", "/missing"],
    ["--factory", "missing:model"], ["--factory", "json:dumps:"], ["--factory", "json"],
])
def test_missing_model_is_told_with_its_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config()))
    assert main(["plan", "--config", str(tmp_path / "ds.json"), *GIVEN, *arguments]) == 1
    assert "fix" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["--read-gbps", "1"], ["--compute-forward-s", "1"], ["--dwpd", "1"],
    ["--path", "/tmp", "--read-gbps", "1", "--write-gbps", "1"],
    ["--ranks", "2", "--ranks-per-node", "3"], ["--rated-tbw", "0"], ["--rated-tbw", "many"],
    ["--rated-tbw", "1", "--dwpd", "1", "--capacity", "1T"],
])
def test_wrong_command_lines_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["plan", "--config", "ds.json", "--factory", f"{__name__}:model", *arguments])
    assert refused.value.code == 2


def test_budget_too_small_does_not_fit_and_says_what_would(plan: Plan) -> None:
    # field cases B01, P03
    found = plan(*GIVEN, "--host-memory", "64K", code=1)
    memory = found["host_memory"]
    assert not memory["fits"] and found["limit"] == "host memory"
    assert memory["smallest_nbytes"] > memory["budget_nbytes"] == 64 << 10
    assert any(str(memory["smallest_nbytes"]) in change["what"] for change in found["changes"])
    assert all(change["fits"] for change in found["changes"])
    fitting = plan(*GIVEN, raw=config(host_memory_nbytes=memory["smallest_nbytes"]))
    assert fitting["host_memory"]["fits"]


def test_nothing_offloaded_is_nothing_to_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert main(["plan", "--config", str(tmp_path / "ds.json"), *GIVEN,
                 "--factory", f"{__name__}:model"]) == 1
    assert "nothing is offloaded" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu")])
def test_tiers_can_be_mixed(plan: Plan, devices: tuple[str, str]) -> None:
    raw = config()
    for name, device in zip(("offload_param", "offload_optimizer"), devices, strict=True):
        raw["zero_optimization"][name] = {"device": device}
        if device == "nvme":
            raw["zero_optimization"][name]["nvme_path"] = "/elsewhere"
    found = plan(*GIVEN, raw=raw)
    for file, device in zip(("params.swp", "optimizer.swp"), devices, strict=True):
        assert (found["bytes"]["nvme"][file] > 0) == (device == "nvme")
    assert (found["phases"]["step"]["write_nbytes"] > 0) == ("nvme" in devices)
    assert devices[0] == "nvme" or found["phases"]["forward"]["read_nbytes"] == 0


def test_more_ranks_take_less_each(plan: Plan) -> None:
    one, eight = plan(*GIVEN), plan(*GIVEN, "--ranks", "8")
    assert eight["model"]["rank_numel"] < one["model"]["rank_numel"] / 6
    assert eight["bytes"]["host"]["arena_nbytes"] < one["bytes"]["host"]["arena_nbytes"]
    # their drives are shared
    assert eight["phases"]["step"]["drive_s"] > one["phases"]["step"]["drive_s"] / 2
    alone = plan(*GIVEN, "--ranks", "8", "--ranks-per-node", "1")
    assert alone["phases"]["step"]["drive_s"] < eight["phases"]["step"]["drive_s"] / 4


def test_gradients_of_a_processor_lie_beside_the_arena(plan: Plan) -> None:
    on_gpu, on_cpu = plan(*GIVEN), plan(*GIVEN, "--device", "cpu")
    assert on_gpu["bytes"]["host"]["gradients_nbytes"] == 0
    assert on_cpu["bytes"]["host"]["gradient_slots_nbytes"] == 0
    assert on_cpu["bytes"]["host"]["gradients_nbytes"] == 4 * on_cpu["model"]["rank_numel"]


def test_device_that_is_too_small_is_told(plan: Plan) -> None:
    assert plan(*GIVEN, "--device-memory", "1G")["device_memory"]["fits"]
    assert not plan(*GIVEN, "--device-memory", "10K")["device_memory"]["fits"]


def test_wear_of_rated_drives(plan: Plan) -> None:
    by_tbw = plan(*GIVEN, "--rated-tbw", "600")
    a_day = by_tbw["phases"]["step"]["write_nbytes"] * 86400 / by_tbw["step_s"]
    assert by_tbw["wear"]["write_nbytes_per_day"] == pytest.approx(a_day)
    assert by_tbw["wear"]["lifetime_days"] == pytest.approx(600e12 / a_day)
    assert plan(*GIVEN)["wear"]["lifetime_days"] is None


def test_wear_is_a_nodes() -> None:
    rating = Rating.of_dwpd(1.0, 1_000_000_000_000, years=5, drives=2)
    found = wear(10**9, 1.0, ranks=4, rating=rating)
    assert found.write_nbytes_per_day == 4 * 86400 * 10**9
    assert found.lifetime_days == pytest.approx(2 * 1e12 * 5 * 365 / (4 * 86400 * 1e9))


def test_drives_and_computing_are_measured_now_and_told_again(plan: Plan, tmp_path: Path) -> None:
    measured = plan("--path", str(tmp_path), "--size", "4M", "--device", "cpu",
                    "--batch", f"{__name__}:batch")
    assert measured["compute_known"]
    assert measured["phases"]["backward"]["host_s"] > 0
    assert all(rate > 0 for rate in measured["rates"]["drives"].values())
    (tmp_path / "again.json").write_text(json.dumps(measured))
    dist.destroy_process_group()  # of the measuring
    again = plan("--bench", "again.json")
    for kind in ("drives", "host"):
        assert again["rates"][kind] == measured["rates"][kind]


def test_benchs_figures_are_taken(plan: Plan, tmp_path: Path) -> None:
    files = []
    for mode, speed in (("read", 3.0), ("write", 1.5)):
        files.append(tmp_path / f"{mode}.json")
        files[-1].write_text(json.dumps({"gb_per_s": speed, "settings": {"mode": mode}}))
    rates = plan("--bench", *map(str, files))["rates"]["drives"]
    assert rates == pytest.approx({"read_nbytes_per_s": 3e9, "write_nbytes_per_s": 1.5e9,
                                   "mixed_nbytes_per_s": 2e9})
    files[0].write_text("{}")
    (tmp_path / "ds.json").write_text(json.dumps(config()))
    assert main(["plan", "--config", str(tmp_path / "ds.json"), "--factory",
                 f"{__name__}:model", "--bench", str(files[0])]) == 1


def test_changes_are_better_and_best_first(plan: Plan) -> None:
    found = plan("--read-gbps", "0.01", "--write-gbps", "0.01", "--compute-forward-s", "0.0001",
                 "--compute-backward-s", "0.0001")
    assert found["limit"] == "drive write"
    seconds = [change["sample_s"] for change in found["changes"]]
    assert seconds == sorted(seconds) and seconds[-1] < found["step_s"]
    assert any("drives" in change["what"] for change in found["changes"])


# --- the arithmetic ---------------------------------------------------------------------------

HOST = HostRates(update_numel_per_s=1e9, digest_nbytes_per_s=1e15)


def footprint(
    tmp_path: Path,
    *,
    device: str = "cpu",
    ranks: int = 1,
    keep_resident_bytes: int = 0,
    **param: Any,
) -> Footprint:
    raw = config(keep_resident_bytes=keep_resident_bytes)
    for name in ("offload_param", "offload_optimizer"):
        raw["zero_optimization"][name]["nvme_path"] = str(tmp_path)
    raw["zero_optimization"]["offload_param"].update(param)
    settings = Config.load(raw)
    with torch.device("meta"):
        made = model()
    return Foresight(made, settings, ranks=ranks, device=device).footprint(settings)


def test_slow_drive_makes_passes_as_long_as_their_reads(tmp_path: Path) -> None:
    drives, foreseen = DriveRates(1e6, 1e6, 1e6), footprint(tmp_path)
    passes = play(foreseen, drives, HOST, Compute(1e-6, 1e-6), micro_batches=1, checksums=True)
    read = passes.forward_read_nbytes + passes.backward_read_nbytes
    assert passes.forward_s + passes.backward_s == pytest.approx(read / 1e6, rel=0.1)


def test_fast_drive_leaves_the_computing(tmp_path: Path) -> None:
    drives = DriveRates(1e15, 1e15, 1e15)
    passes = play(footprint(tmp_path), drives, HOST, Compute(1.0, 2.0), micro_batches=3,
                  checksums=True)
    assert passes.forward_s == pytest.approx(3.0, rel=1e-3)
    assert passes.backward_s == pytest.approx(6.0, rel=1e-3)


def test_what_is_kept_is_read_no_more(tmp_path: Path) -> None:
    drives = DriveRates(1e6, 1e6, 1e6)
    passes = play(footprint(tmp_path, max_in_cpu=10**9), drives, HOST, Compute(1.0, 2.0),
                  micro_batches=2, checksums=True)
    assert passes.forward_read_nbytes == passes.backward_read_nbytes == 0


def test_what_stays_on_the_gpu_is_neither_read_nor_given_a_slot(tmp_path: Path) -> None:
    """The small ones always, others by `keep_resident_bytes`."""
    drives, compute = DriveRates(1e6, 1e6, 1e6), Compute(1.0, 2.0)
    on_host = footprint(tmp_path)
    on_gpu = footprint(tmp_path, device="cuda")
    whole = footprint(tmp_path, keep_resident_bytes=1 << 30)
    small_nbytes = sum(2 * p.numel() for p in model().parameters() if 2 * p.numel() < 1000)
    assert on_host.kept_nbytes == small_nbytes > 0
    assert on_gpu.kept_nbytes == whole.kept_nbytes == 0
    assert on_gpu.device_nbytes == 2 * small_nbytes  # fp32
    read = [play(each, drives, HOST, compute, micro_batches=1, checksums=True)
            for each in (on_host, on_gpu, whole)]
    assert read[0].forward_read_nbytes == read[1].forward_read_nbytes > 0
    assert read[2].forward_read_nbytes == read[2].backward_read_nbytes == 0


def test_one_gpu_has_room_for_what_is_copied_ahead(tmp_path: Path) -> None:
    """It gathers one group at a time, and the next two are there; several ranks gather two."""
    one = footprint(tmp_path, device="cuda")
    two = footprint(tmp_path, device="cuda", ranks=2)
    on_host = footprint(tmp_path)
    block, small = 2 * 2 * 4 * DIM * DIM, 2 * 5 * DIM  # weights and biases of a block, in bf16
    root = 2 * (DIM * 10 + 10)
    assert one.ahead_nbytes == 2 * block
    assert two.ahead_nbytes == on_host.ahead_nbytes == 0
    gradient = block + small
    assert one.device_peak_nbytes - one.device_nbytes == root + 3 * block + small + gradient
    assert two.device_peak_nbytes - two.device_nbytes == root + 2 * (block + small) + gradient
    none_swapped = footprint(tmp_path, device="cuda", keep_resident_bytes=1 << 30)
    assert none_swapped.ahead_nbytes == 0


def test_step_is_the_longer_of_moving_and_updating(tmp_path: Path) -> None:
    foreseen = footprint(tmp_path)
    fast, slow = DriveRates(1e15, 1e15, 1e15), DriveRates(1e6, 1e6, 1e6)
    quick = step(foreseen, fast, HOST, checksums=True)
    assert quick.step_s == pytest.approx(foreseen.trained_numel / 1e9, rel=1e-2)
    long = step(foreseen, slow, HOST, checksums=True)
    assert long.step_s >= (long.read_nbytes + long.write_nbytes) / 1e6
