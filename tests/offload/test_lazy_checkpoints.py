"""A checkpoint goes to its home a tensor at a time, into a skeleton that takes no memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import nvmeswap
from nvmeswap.errors import SwapManifestError, SwapUsageError
from tests.offload.components import DIM, Denoiser, seeded

X = torch.linspace(-1, 1, 8 * DIM).view(8, DIM)


@pytest.fixture(params=["cpu", "nvme"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    return {"device": "cpu", **({"path": nvme} if request.param == "nvme" else {})}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a denoiser, with values that no constructor gives."""
    path = tmp_path / "model.safetensors"
    save_file({name: value + 0.25 for name, value in seeded(Denoiser).state_dict().items()}, path)
    return path


def wanted() -> nn.Module:
    plain = seeded(Denoiser)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.25
    return plain


def build() -> nn.Module:
    return Denoiser().requires_grad_(False)


def test_checkpoint_equals_the_module_it_was_saved_from(
    checkpoint: Path, place: dict[str, Any]
) -> None:
    # field case C22. Beside weights: a parameter made of ones, a buffer that is never saved.
    lazy = nvmeswap.lazy(build, checkpoint=checkpoint, **place)
    parameter = next(iter(build().parameters()))
    assert lazy.hidden_size == DIM and isinstance(lazy, Denoiser)
    for _ in range(2):
        assert torch.equal(lazy(X), wanted()(X))
        lazy.release()
    assert parameter.shape == lazy.scale.shape
    lazy.close()


def test_skeleton_is_no_reading_and_takes_flags(checkpoint: Path, place: dict[str, Any]) -> None:
    # field case C3: before the first load, too
    lazy = nvmeswap.lazy(Denoiser, checkpoint=checkpoint, **place)
    moved = checkpoint.rename(checkpoint.with_name("elsewhere"))
    assert lazy.hidden_size == DIM and lazy.eval() is lazy and lazy.requires_grad_(False) is lazy
    lazy.sparse = True
    moved.rename(checkpoint)
    plain = wanted()
    plain.sparse = True  # type: ignore[assignment]
    assert torch.equal(lazy(X), plain(X)) and not lazy.training
    assert not any(parameter.requires_grad for parameter in lazy.parameters())
    lazy.close()


def test_folder_with_an_index_is_one_checkpoint(
    checkpoint: Path, tmp_path: Path, place: dict[str, Any]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    state = wanted().state_dict()
    names = sorted(state)
    files = {name: f"{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    lazy = nvmeswap.lazy(build, checkpoint=folder, **place)
    assert torch.equal(lazy(X), wanted()(X))
    lazy.close()


def test_dtype_is_converted_on_the_way(checkpoint: Path, place: dict[str, Any]) -> None:
    lazy = nvmeswap.lazy(build, checkpoint=checkpoint, dtype=torch.bfloat16, **place)
    plain = wanted()
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert {p.dtype for p in lazy.parameters()} == {torch.bfloat16}
    assert lazy.frequencies.dtype is torch.float32  # no checkpoint has it
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lazy(X), plain(X))
    lazy.close()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(x)))
        return out


@pytest.mark.parametrize("saved_as", ["embed.weight", "head.weight"])
def test_tied_weights_are_read_once_and_stay_tied(
    tmp_path: Path, place: dict[str, Any], saved_as: str
) -> None:
    plain = Tied().eval().requires_grad_(False)
    state = {name: value + 0.5 for name, value in plain.state_dict().items() if "num" not in name}
    state |= {"norm.num_batches_tracked": torch.tensor(3)}
    del state[{"embed.weight": "head.weight", "head.weight": "embed.weight"}[saved_as]]
    save_file(state, tmp_path / "tied.safetensors")
    lazy = nvmeswap.lazy(Tied, checkpoint=tmp_path / "tied.safetensors", **place)
    lazy.eval()
    plain.load_state_dict(state, strict=False)
    tokens = torch.arange(12)
    assert torch.equal(lazy(tokens), plain(tokens))
    assert lazy.head.weight is lazy.embed.weight
    assert lazy.norm.num_batches_tracked == 3
    lazy.close()


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(state: dict[str, Tensor]) -> None:
        del state[name]
    return edit


def more(state: dict[str, Tensor]) -> None:
    state["extra.weight"] = torch.zeros(1)


def other_shape(state: dict[str, Tensor]) -> None:
    state["scale"] = torch.zeros(3)


@pytest.mark.parametrize(("edit", "field"), [
    (without("blocks.1.0.weight"), "blocks.1.0.weight"), (more, "extra.weight"),
    (other_shape, "scale"),
])
def test_names_that_differ_are_named_and_nothing_is_kept(
    checkpoint: Path, place: dict[str, Any], edit: Callable[[dict[str, Tensor]], None], field: str
) -> None:
    good = wanted().state_dict()
    state = dict(good)
    edit(state)
    save_file(state, checkpoint)
    lazy = nvmeswap.lazy(build, checkpoint=checkpoint, **place)
    with pytest.raises(SwapManifestError) as raised:
        lazy(X)
    assert raised.value.field == field
    save_file(good, checkpoint)
    assert torch.equal(lazy(X), wanted()(X))
    lazy.close()


def test_buffer_without_any_value_is_named(checkpoint: Path, place: dict[str, Any]) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Denoiser()

    lazy = nvmeswap.lazy(on_meta, checkpoint=checkpoint, **place)
    with pytest.raises(SwapManifestError) as raised:
        lazy.load()
    assert raised.value.field == "frequencies"
    assert isinstance(nvmeswap.lazy(build, "cpu", checkpoint="nowhere"), Denoiser)
    with pytest.raises(SwapUsageError):
        nvmeswap.lazy(build, "cpu", checkpoint="nowhere").load()


def peak_nbytes() -> int:
    """The most memory that this process had since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_checkpoint_is_never_whole_in_memory(tmp_path: Path) -> None:
    # field case C22: loading what is larger than memory
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))

    path = tmp_path / "large.safetensors"
    save_file({f"{index}.weight": torch.zeros(1024, 1024) for index in range(32)}, path)
    small = nvmeswap.lazy(lambda: nn.Linear(8, 8), "cpu", path=tmp_path)
    small.load()  # what the first one of all costs
    lazy = nvmeswap.lazy(build, "cpu", checkpoint=path, path=tmp_path, buffer_count=1)
    forget_peak()
    before_nbytes = peak_nbytes()
    lazy.stats()
    assert peak_nbytes() - before_nbytes < path.stat().st_size // 2
    for each in (small, lazy):
        each.close()
