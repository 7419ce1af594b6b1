"""A swapped parameter gives its values to whoever asks, and refuses what would be lost."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from nvmeswap.zero3.tensor import SwappedTensor
from tests.zero3.cases import AwkwardModel, Case, build


@pytest.fixture(params=[False, True], ids=["fp32", "bf16"])
def sharded(
    request: pytest.FixtureRequest, one_rank: None, tmp_path: Path
) -> Iterator[tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """A model on NVMe, and the values that it had in RAM."""
    case = Case(bf16=request.param)
    resident = {name: value.clone() for name, value in build(case).state_dict().items()}
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    yield model, resident
    optimizer.swap.close()


Sharded = tuple[AwkwardModel, dict[str, torch.Tensor]]


def test_every_parameter_is_swapped_and_has_no_storage(sharded: Sharded) -> None:
    """0 resident bytes: what the whole exercise is for."""
    model, _ = sharded
    for parameter in model.parameters():
        assert isinstance(parameter._local_tensor, SwappedTensor)
        with pytest.raises((RuntimeError, NotImplementedError)):
            parameter._local_tensor.untyped_storage().data_ptr()


def test_reading_gives_the_full_precision_values(sharded: Sharded) -> None:
    """bf16 on the drive must not round what a checkpoint saves.  field case F08"""
    model, resident = sharded
    for name, value in model.state_dict().items():
        full = value.full_tensor()
        assert torch.equal(full.clone(), resident[name]), name
        for copy in (full.cpu(), full.contiguous(), torch.from_numpy(full.numpy())):
            assert type(copy) is torch.Tensor
            assert torch.equal(copy, resident[name]), name
        assert full.tolist() == resident[name].tolist()
        assert (value.norm().full_tensor() - resident[name].norm()).abs() < 1e-4


def test_saved_file_holds_the_values_and_needs_no_swap_space(sharded: Sharded) -> None:
    """Placeholders in a checkpoint would be found out weeks later.  field case F08"""
    model, resident = sharded
    file = io.BytesIO()
    torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, file)
    assert len(file.getvalue()) > sum(value.nbytes for value in resident.values()) / 2
    file.seek(0)
    for name, value in torch.load(file, weights_only=True).items():
        assert type(value) is torch.Tensor and torch.equal(value, resident[name])


def test_loading_a_state_dict_reaches_the_drive(sharded: Sharded) -> None:
    """A silent no-op would train on with the old weights."""
    model, resident = sharded
    changed = {name: value + 1 for name, value in resident.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter._local_tensor.copy_(changed[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().clone(), changed[name]), name


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.add_(1),
        lambda t: t.zero_(),
        lambda t: torch.nn.init.normal_(t),
        lambda t: t[:1],
        lambda t: t.view(-1)[0],
        lambda t: t.t() if t.dim() == 2 else t.view(1, -1),
        lambda t: torch.zeros_like(t),
        lambda t: t.new_empty(3),
        lambda t: torch.nn.functional.dropout(t, 0.5),
        lambda t: torch._foreach_mul_([t], 2.0),
        lambda t: torch.add(t, 1, out=t),
    ],
)
def test_operation_that_would_be_lost_is_refused_by_name(sharded: Sharded, operation) -> None:
    """Each of these would change or return a copy that nobody keeps."""
    model, _ = sharded
    local = model.blocks[0].up.weight._local_tensor
    with torch.no_grad(), pytest.raises(SwapUsageError) as raised:
        operation(local)
    assert raised.value.fix


def test_moving_or_casting_the_model_is_refused_or_harmless(sharded: Sharded) -> None:
    """`.half()` would make the model resident and drop the hooks without a word."""
    model, resident = sharded
    model.to("cpu")
    for convert in (
        lambda: model.half(),
        lambda: model.blocks[0].up.bfloat16(),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="cpu"),
    ):
        with pytest.raises(SwapUsageError):
            convert()
    tokens = torch.zeros(1, 2, dtype=torch.long)
    assert model(tokens).isfinite().all()
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor().clone(), resident[name]), name


def test_using_the_model_after_close_says_so(one_rank: None, tmp_path: Path) -> None:
    """Else a closed swap space would read as garbage."""
    case = Case()
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path))
    optimizer.swap.close()
    optimizer.swap.close()
    with pytest.raises(SwapUsageError, match="closed"):
        model(torch.zeros(1, 2, dtype=torch.long))
    assert not list(tmp_path.rglob("*.swp"))
