"""Weights in safetensors files: read module by module, and refused by name where they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nvmeswap.zero3
from nvmeswap.errors import SwapManifestError, SwapPathError, SwapUsageError
from nvmeswap.swap.weights import Weights
from tests.zero3.cases import Case, build
from tests.zero3.meta_ranks import on_meta, save_in_two


def write_index(folder: Path) -> None:
    """As Hugging Face writes it, beside an old file that it does not name."""
    places = {
        name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"strange": torch.zeros(3)}, folder / "consolidated.safetensors")


@pytest.mark.parametrize("kind", ["folder", "index", "one file"])
@pytest.mark.parametrize("make", [on_meta, build])
def test_weights_are_those_of_the_files(
    one_rank: None, tmp_path: Path, kind: str, make: Callable[[Case], nn.Module]
) -> None:
    """On meta and over what is in memory; tied weights are in the files once."""
    case = Case()
    torch.manual_seed(9)
    other = type(build(case))(dim=case.dim)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    path = tmp_path / "model"
    path.mkdir()
    save_in_two(other, path)
    if kind == "index":
        write_index(path)
    if kind == "one file":
        whole = {name: v for file in path.iterdir() for name, v in load_file(file).items()}
        path = tmp_path / "model.safetensors"
        save_file(whole, path)
    model, optimizer = nvmeswap.zero3.shard(make(case), case.config(tmp_path), weights=path)
    for name, values in other.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), values), name
    optimizer.close()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_are_loaded_and_those_that_are_not_saved_are_initialised(
    one_rank: None, tmp_path: Path, device: str
) -> None:
    """A running mean is in the files; a table that is not is made by the user's function."""
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40))
        model[0].register_buffer("table", torch.arange(4.0), persistent=False)
        return model

    def initialise(module: nn.Module) -> None:
        module.table = torch.arange(4.0)  # type: ignore[assignment]

    trained = make()
    trained(torch.randn(8, 6))
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    with torch.device(device):
        model = make()
    model, optimizer = nvmeswap.zero3.shard(
        model, Case().config(tmp_path),
        weights=tmp_path / "weights.safetensors", initialise=initialise,
    )
    for name, values in trained.state_dict().items():
        own = model.state_dict()[name]
        assert torch.equal(own.full_tensor() if hasattr(own, "full_tensor") else own, values), name
    assert torch.equal(model[0].table, torch.arange(4.0))
    optimizer.close()


def lacks_one(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    del tensors["1.bias"]
    return "1.bias"


def has_one_more(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    tensors["model.rotary"] = torch.zeros(3)
    return "model.rotary"


def other_shape(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    tensors["0.weight"] = tensors["0.weight"].t().reshape(-1)
    return "0.weight"


def quantised(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    tensors["0.weight"] = tensors["0.weight"].to(torch.int8)
    return "0.weight"


def index_lies(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    places = dict.fromkeys([*tensors, "lost"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return "lost"


def index_is_broken(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return "weight_map"


def twice(tensors: dict[str, torch.Tensor], folder: Path) -> str:
    save_file({"1.bias": torch.zeros(40)}, folder / "another.safetensors")
    return "1.bias"


@pytest.mark.parametrize(
    "change",
    [lacks_one, has_one_more, other_shape, quantised, index_lies, index_is_broken, twice],
)
def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_written(
    one_rank: None, tmp_path: Path, change: Callable[[dict[str, torch.Tensor], Path], str]
) -> None:
    """A name that is wrong costs minutes, and must not cost a run."""
    model = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40))
    tensors, folder = dict(model.state_dict()), tmp_path / "weights"
    folder.mkdir()
    name = change(tensors, folder)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SwapManifestError) as raised:
        nvmeswap.zero3.shard(
            model.to("meta"), Case().config(tmp_path), weights=folder
        )
    error = raised.value
    assert error.field == name and error.fix
    assert error.path is not None and error.path.is_relative_to(folder)
    assert not list(tmp_path.rglob("*.swp"))


def test_files_that_are_missing_or_damaged_are_refused(one_rank: None, tmp_path: Path) -> None:
    """Before anything is written, with the file's name."""
    model = nn.Linear(30, 40, device="meta")
    empty, cut = tmp_path / "empty", tmp_path / "cut.safetensors"
    empty.mkdir()
    save_file({"weight": torch.zeros(40, 30), "bias": torch.zeros(40)}, cut)
    cut.write_bytes(cut.read_bytes()[:-4])
    for path, kind in (
        (empty, SwapUsageError), (tmp_path / "nowhere", SwapUsageError), (cut, SwapManifestError),
    ):
        with pytest.raises(kind) as raised:
            nvmeswap.zero3.shard(model, Case().config(tmp_path), weights=path)
        assert raised.value.path == path
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "gone")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "link.safetensors"}})
    )
    with pytest.raises(SwapPathError):
        nvmeswap.zero3.shard(model, Case().config(tmp_path), weights=tmp_path)


def test_many_names_are_looked_up_not_searched(tmp_path: Path) -> None:
    """40 000 names; a search of each among all takes 20 s.  field case E06"""
    names = [f"layers.{index}.weight" for index in range(40_000)]
    for part in range(2):
        entries = {
            name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names[part::2]
        }
        header = json.dumps(entries).encode()
        file = tmp_path / f"{part}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    weights = Weights(tmp_path)
    assert weights.tensors.keys() == set(names)
    assert all(weights.file_of(name).parent == tmp_path for name in names)
    weights.close()


LAYERS, WIDTH = 24, 1024  # 4 MiB each, 96 MiB in all, and 288 MiB of masters and moments
SET_UP = """
import sys, torch
from pathlib import Path
import nvmeswap.zero3
from torch import nn

folder, weights = sys.argv[1:]
place = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}

def config(bf16):
    return {
        "zero_optimization": {
            "stage": 3, "sub_group_size": 1 << 18,
            "offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place,
        },
        "bf16": {"enabled": bf16},
        "aio": {"block_size": 1 << 18, "queue_depth": 8},
    }

def build(layers):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if name in line)

nvmeswap.zero3.shard(build(2), config(False))[1].close()  # code, threads and their stacks
for bf16, values in ((False, {}), (True, {"weights": weights})):
    model = build(LAYERS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    model, optimizer = nvmeswap.zero3.shard(model, config(bf16), **values)
    print(1024 * (kib("VmHWM") - before), optimizer.swap.stats().arena_nbytes)
    optimizer.close()
"""


def test_set_up_takes_the_budget_and_one_module(tmp_path: Path) -> None:
    """The peak of resident memory while a model of 96 MiB is built, drawn in fp32 and then read
    from three files in bf16.  field cases B07, B08, B14; request 10"""
    weights = tmp_path / "model"
    weights.mkdir()
    for part in range(3):
        names = [f"{index}.weight" for index in range(part, LAYERS, 3)]
        values = {name: torch.zeros(WIDTH, WIDTH) for name in names}
        save_file(values, weights / f"{part}.safetensors")
    program = SET_UP.replace("LAYERS", str(LAYERS)).replace("WIDTH", str(WIDTH))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(weights)],
        capture_output=True, text=True, timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    module_nbytes, slack_nbytes = WIDTH * WIDTH * 4, 20 << 20
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        grown_nbytes, arena_nbytes = map(int, line.split())
        assert grown_nbytes < arena_nbytes + module_nbytes + slack_nbytes, done.stdout
