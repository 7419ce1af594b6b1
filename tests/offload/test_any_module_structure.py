"""A model of any structure runs and trains managed as it does plain, and is whole afterwards."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import SwapError
from tests.offload import moving_structures, torch_structures
from tests.offload.conftest import Manage
from tests.offload.runs import (
    DIM,
    LEARNING_RATE,
    assert_equal,
    frozen,
    infer,
    input_of,
    stack,
    train,
    twins,
    weights_of,
)
from tests.offload.structures import STRUCTURES, Held, Structure, TiedByParameter, tokens

assert moving_structures and torch_structures  # they add their own
WAYS: list[tuple[str, Any]] = [("cpu", 1500), ("nvme", "leaf")]
DTYPES = [
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.bool, torch.int64, torch.int16, torch.int32, torch.float64, torch.complex64,
    torch.complex128,
]

each_structure = pytest.mark.parametrize("name", STRUCTURES)
each_way = pytest.mark.parametrize("tier, granularity", WAYS)


@each_structure
@each_way
def test_trained(manage: Manage, name: str, tier: str, granularity: Any) -> None:
    case = STRUCTURES[name]
    if case.frozen_only:
        pytest.skip("torch itself can't update such a parameter")
    plain, model = twins(case.build)
    manager = manage(model, tier=tier, trainable=tier, granularity=granularity)
    assert_equal(train(model, case.call), train(plain, case.call))
    assert manager.stats().resident_unit_count == 0
    manager.close()
    assert_equal(infer(model, case.call), infer(plain, case.call))


@each_structure
@pytest.mark.parametrize("tier, granularity", [("cpu", "leaf"), ("nvme", "block")])
def test_frozen(manage: Manage, name: str, tier: str, granularity: Any) -> None:
    """Gradients go through it; then it is used without."""
    case = STRUCTURES[name]
    plain, model = (frozen(each) for each in twins(case.build))
    manager = manage(model, tier=tier, granularity=granularity)
    assert_equal(train(model, case.call), train(plain, case.call))
    model.eval(), plain.eval()
    assert_equal(infer(model, case.call, calls=3), infer(plain, case.call, calls=3))
    assert manager.stats().resident_unit_count == 0


@each_structure
def test_trained_parts_stay_where_the_rest_goes(manage: Manage, name: str) -> None:
    """Of each module the last parameter is trained, on the device."""
    case = STRUCTURES[name]
    if case.frozen_only:
        pytest.skip("torch itself can't update such a parameter")
    plain, model = twins(case.build)
    for each in (plain, model):
        for index, parameter in enumerate(each.parameters()):
            parameter.requires_grad_(index % 2 == 1 and parameter.is_floating_point())
    manage(model, tier="nvme", trainable="resident")
    assert_equal(train(model, case.call), train(plain, case.call))


@each_structure
def test_what_is_read_from_outside_is_real(
    manage: Manage, name: str, tier: str = "nvme"
) -> None:
    """Shapes, dtypes, strides and values, between calls and in the state. features F15, F16"""
    case = STRUCTURES[name]
    plain, model = twins(case.build)
    before = plain.state_dict()
    manager = manage(model, tier=tier, trainable=tier)
    for state in (model.state_dict(), manager.state_dict()):
        assert list(state) == list(before)
        for key, tensor in state.items():
            assert tensor.shape == before[key].shape and tensor.dtype == before[key].dtype
            assert torch.equal(tensor, before[key])
    assert weights_of(model).keys() == weights_of(plain).keys()
    for key, tensor in weights_of(model).items():
        assert torch.equal(tensor, weights_of(plain)[key]), key


# --- dtypes --------------------------------------------------------------------------------------


def of_dtype(dtype: torch.dtype) -> list[torch.Tensor]:
    """Any bits, of several sizes, a scalar and nothing among them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(), (0,), (1,), (7,), (5, 9)]
    if dtype is torch.bool:
        return [torch.rand(size, generator=generator) > 0.5 for size in sizes]
    numbers = [torch.randint(0, 100, size, generator=generator) for size in sizes]
    return [each.to(torch.float32).to(dtype) for each in numbers]


class OfDtype(nn.Module):
    """Frozen parameters and buffers of one dtype, in a unit of their own and beside others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        for index, tensor in enumerate(of_dtype(dtype)):
            self.register_buffer(f"buffer_{index}", tensor.clone())
            setattr(self, f"frozen_{index}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for name, tensor in (*self.named_parameters(recurse=False), *self.named_buffers()):
            number = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            x = x + number.to(torch.float32).sum() * len(name)
        return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_tensors_of_each_dtype_come_and_go(
    manage: Manage, tier: str, dtype: torch.dtype
) -> None:
    """field case E01, E02"""
    plain, model = twins(lambda: nn.Sequential(OfDtype(dtype), OfDtype(dtype)))
    manager = manage(model, tier=tier, trainable=tier)
    assert_equal(train(model), train(plain))
    nbytes = sum(each.numel() * each.itemsize for each in (*model.parameters(), *model.buffers()))
    alignment = 256 if tier == "cpu" else 4096
    count = len([*model.parameters(), *model.buffers()])
    assert sum(unit.nbytes for unit in manager.units) <= nbytes + alignment * count


class Scaled(torch.Tensor):
    """A tensor made of two."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, dtype=torch.float32
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self._data, self._scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["_data"], inner["_scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0]._data, args[0]._scale)
        plain = [a._data.float() * a._scale if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        data = torch.randint(-100, 100, (DIM, DIM)).to(torch.int8)
        weight = Scaled(data, torch.tensor(0.01))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_tensor_made_of_two_moves_whole_or_is_refused_by_name(manage: Manage, tier: str) -> None:
    """features F21; field case C13"""
    plain, model = (nn.Sequential(nn.Linear(DIM, DIM), each) for each in twins(Quantised))
    model.load_state_dict(plain.state_dict(), strict=False)
    x = input_of(0)
    assert torch.equal(model(x), plain(x))
    try:
        manage(model, tier=tier)
    except SwapError as error:
        assert "1.weight" in str(error) and error.fix
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_tensors_on_meta_are_refused_by_name(manage: Manage, tier: str) -> None:
    """features F21; field case E03, E04"""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, device="meta"))
    with pytest.raises(SwapError, match=r"1\.weight") as raised:
        manage(model, tier=tier)
        infer(model)
    assert raised.value.fix
    assert model[0](input_of(0)).shape == (3, 5, DIM)


# --- copies of a managed model -------------------------------------------------------------------


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("when", ["fresh", "trained", "closed"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_copy_of_a_managed_model_is_plain_and_on_its_own(
    manage: Manage, tier: str, when: str, copied: Any
) -> None:
    plain, model = twins(TiedByParameter)
    manager = manage(model, tier=tier, trainable=tier)
    if when != "fresh":
        assert_equal(train(model, tokens), train(plain, tokens))
    if when == "closed":
        manager.close()
    other = copied(model)
    assert type(other) is TiedByParameter
    assert other.head.weight is other.embedding.weight
    assert_equal(infer(other, tokens), infer(plain, tokens))
    assert_equal(train(other, tokens), train(copy.deepcopy(plain), tokens))
    assert_equal(infer(model, tokens), infer(plain, tokens))  # which the copy's training left alone
    manager.close()
    assert_equal(infer(copied(other), tokens), infer(other, tokens))


# --- changes from outside ------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", ["frozen", "same"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_values_set_from_outside_are_used(manage: Manage, tier: str, trainable: str) -> None:
    """By each way in which scripts set them, with no manager in mind. features C1, C2"""
    plain, model = stack(), stack()
    if trainable == "frozen":
        frozen(plain), frozen(model)
    manage(model, tier=tier, trainable=tier)
    infer(model)
    for each in (plain, model):
        with torch.no_grad():
            each[0].weight.add_(1)
            each[1].weight[3, 4] = 7
            each[2].weight.copy_(torch.eye(DIM))
            nn.init.constant_(each[3].bias, 0.25)
        each[4].weight.data = each[4].weight.data * 2
        each[5].load_state_dict({"weight": torch.ones(DIM, DIM), "bias": torch.ones(DIM)})
    assert_equal(infer(model), infer(plain))
    assert_equal(train(model), train(plain))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_values_written_past_autograd_are_used_or_refused(manage: Manage, tier: str) -> None:
    """`.data` has no version: what is on NVMe can't be written this way, and says so."""
    plain, model = frozen(stack()), frozen(stack())
    manage(model, tier=tier)
    infer(model)
    for each in (plain, model):
        each[4].weight.data.mul_(0.5)
    try:
        numbers = infer(model)
    except SwapError as error:
        assert tier == "nvme" and error.fix
    else:
        assert_equal(numbers, infer(plain))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_new_parameter_or_module_is_used_or_refused(manage: Manage, tier: str) -> None:
    """field case C04"""
    plain, model = frozen(stack()), frozen(stack())
    manage(model, tier=tier, trainable="resident")
    infer(model)
    torch.manual_seed(5)
    weight, layer = torch.randn(DIM, DIM), nn.Linear(DIM, DIM)
    for each in (plain, model):
        each[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
        each[2].weight.data = weight.clone()
        each[3] = copy.deepcopy(layer)
        each[4].register_parameter("extra", nn.Parameter(torch.ones(3)))
    try:
        numbers = infer(model)
    except SwapError as error:
        assert error.fix
    else:
        assert_equal(numbers, infer(plain))


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_layer_wrapped_by_an_adapter_afterwards_trains(manage: Manage, tier: str) -> None:
    """field case C04"""
    plain, model = frozen(stack()), frozen(stack())
    manage(model, tier=tier)
    for each in (plain, model):
        torch.manual_seed(3)
        each[0] = LowRank(each[0])
    assert_equal(train(model), train(plain))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_sparse_gradients_are_applied(manage: Manage, tier: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, DIM, sparse=True), nn.Linear(DIM, DIM))

    plain, model = twins(build)
    manage(model, tier=tier, trainable=tier)
    ours, reference = (
        train(each, tokens, optimizer=torch.optim.SGD(each.parameters(), lr=LEARNING_RATE))
        for each in (model, plain)
    )
    assert_equal(ours, reference)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_model_without_tensors_or_of_one_runs(manage: Manage, tier: str) -> None:
    for build in (nn.Identity, nn.Sequential, lambda: nn.Linear(DIM, DIM)):
        plain, model = twins(build)
        with manage(model, tier=tier, trainable=tier):
            assert_equal(train(model), train(plain))


def test_list_of_names_says_what_is_a_unit(manage: Manage) -> None:
    """Each with all below it, once; the rest is managed too. field case C10"""
    case: Structure = STRUCTURES["nested"]
    plain, model = twins(case.build)
    manager = manage(model, tier="cpu", trainable="cpu", granularity=["1", "2.1"])
    named = {unit.name: unit.names for unit in manager.units}
    assert set(named["1"]) >= {"1.0.weight", "1.0.bias", "1.1.0.weight", "1.1.0.bias"}
    assert set(named["2.1"]) >= {"2.1.0.gate", "2.1.0.offset", "2.1.0.inner.weight"}
    every = [name for unit in manager.units for name in unit.names]
    assert sorted(every) == sorted(
        name for name, _ in (*model.named_parameters(), *model.named_buffers())
    )
    assert_equal(train(model), train(plain))


def test_names_of_units_that_are_no_modules_are_refused(manage: Manage) -> None:
    with pytest.raises(SwapError, match="nowhere") as raised:
        manage(stack(), tier="cpu", granularity=["0", "nowhere"])
    assert raised.value.fix


@pytest.mark.parametrize("dtype, splits", [(torch.float32, True), (torch.float8_e4m3fn, False)])
@pytest.mark.parametrize("size", [4096, "4KiB"])
def test_granularity_is_in_bytes(
    manage: Manage, size: Any, dtype: torch.dtype, splits: bool
) -> None:
    """features F5, A22; field case C11"""
    weights = [torch.zeros(32, 32).to(dtype) for _ in range(2)]
    model = nn.Sequential(*(Held(each) for each in weights))
    for each in model:
        del each.factor
    manager = manage(model, tier="cpu", trainable="cpu", granularity=size)
    assert len(manager.units) == (2 if splits else 1)
    assert all(unit.nbytes <= 4096 + 256 for unit in manager.units)
