"""A model that was built on the meta device trains as the same model built in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from tests.oracle import Run, first_difference
from tests.zero3.cases import Case, build, run_in_ram, train
from tests.zero3.meta_ranks import initialise_as_built, on_meta, run_from_meta, save_in_two
from tests.zero3.ranks import run_ranks

STEPS = 2


@functools.cache
def reference(bf16: bool) -> Run:
    return run_in_ram(Case(bf16=bf16, steps=STEPS))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("params", "optimizer"),
    [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme"), ("none", "nvme"), ("none", "none")],
)
def test_model_from_meta_equals_ram_in_every_place(
    one_rank: None, tmp_path: Path, params: str, optimizer: str, bf16: bool
) -> None:
    """Tied, frozen and tiny parameters, on every pair of devices; plain FSDP2 too.
    field cases E05, M03"""
    case = Case(bf16=bf16, params=params, optimizer=optimizer, steps=STEPS)
    assert first_difference(run_from_meta(case, tmp_path), reference(bf16)) is None


def test_two_ranks_equal_ram_and_learn_of_each_others_errors(tmp_path: Path) -> None:
    """Each rank draws all numbers and keeps its part, or reads its part of the files. Weights drawn
    from two seeds would be parts of two models: refused."""
    first, second = run_ranks(2, "from_meta", tmp_path)
    assert first == ["SwapUsageError", "SwapPeerError"] * 2
    assert second == ["SwapUsageError", "SwapUsageError"] * 2


def test_random_numbers_go_on_as_after_building_in_memory(one_rank: None, tmp_path: Path) -> None:
    """What the caller draws next, data order for instance, must not change either; and what is
    tied takes its numbers, too."""
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
        model[2].weight = model[0].weight
        return model.append(nn.Linear(11, 7))

    torch.manual_seed(3)
    expected = make()
    next_number = torch.rand(())
    torch.manual_seed(3)
    with torch.device("meta"):
        model = make()
    config = Case(optimizer="none", params="none").config(tmp_path)
    with pytest.raises(SwapUsageError, match="tied"):
        nvmeswap.zero3.shard(model, config)
    mesh = init_device_mesh("cpu", (1,))
    model, _ = nvmeswap.zero3.shard(fully_shard(model, mesh=mesh), config)
    assert torch.equal(torch.rand(()), next_number)
    for name, values in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), values), name


def test_attention_initialises_its_projection_as_in_memory(
    one_rank: None, tmp_path: Path
) -> None:
    """torch's attention writes a bias of the module in it."""
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    assert_equals_in_memory(make, tmp_path)


def test_buffers_of_batch_norm_are_real_and_updated(one_rank: None, tmp_path: Path) -> None:
    """Buffers stay in memory, on the device, and forward writes them."""
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))

    model = assert_equals_in_memory(make, tmp_path)
    model(torch.randn(5, 6))
    assert model[1].num_batches_tracked.item() == 1


def assert_equals_in_memory(make: Any, nvme_path: Path) -> nn.Module:
    torch.manual_seed(5)
    expected = make()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = make()
        # Still in the block: only the model is meant to be on meta.  field case M05
        model, optimizer = nvmeswap.zero3.shard(model, Case().config(nvme_path))
    ours = model.state_dict()
    assert list(ours) == list(expected.state_dict())
    for name, values in expected.state_dict().items():
        own = ours[name].full_tensor() if hasattr(ours[name], "full_tensor") else ours[name]
        assert torch.equal(own, values), name
    model.swapped_by = optimizer
    return model


def test_building_in_a_block_inside_a_block_swaps_once(one_rank: None, tmp_path: Path) -> None:
    """Libraries open one of their own in the user's.  field case M05"""
    with torch.device("meta"), torch.device("meta"):
        model, optimizer = nvmeswap.zero3.shard(nn.Linear(64, 64), Case().config(tmp_path))
    numel = sum(parameter.numel() for parameter in model.parameters())
    stats = optimizer.swap.stats().params
    assert stats.nvme_nbytes + stats.ram_nbytes == 4 * numel
    assert len(list(tmp_path.rglob("params.swp"))) == 1
    optimizer.close()


def test_same_shapes_on_meta_are_not_taken_for_tied(one_rank: None, tmp_path: Path) -> None:
    """All meta tensors have address 0.  field case E03"""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))

    def initialise(module: nn.Module) -> None:
        module.weight.fill_([*model].index(module))  # type: ignore[operator, arg-type]

    config = Case().config(tmp_path)
    model, optimizer = nvmeswap.zero3.shard(model, config, initialise=initialise)
    assert [layer.weight.full_tensor().mean().item() for layer in model] == [0.0, 1.0, 2.0]
    optimizer.close()


def test_what_is_real_already_keeps_its_values(one_rank: None, tmp_path: Path) -> None:
    """A model that is on meta in part; neither its parameters nor its buffers are drawn anew.
    field case E04"""
    real = nn.BatchNorm1d(40)
    nn.init.normal_(real.weight)
    real.running_mean.fill_(3.0)
    real.bias = nn.Parameter(torch.empty(40, device="meta"))
    expected = real.weight.detach().clone()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 40), real)
    model, optimizer = nvmeswap.zero3.shard(model, Case().config(tmp_path))
    assert torch.equal(model[1].weight.full_tensor(), expected)
    assert (model[1].running_mean == 3.0).all() and (model[1].bias.full_tensor() == 0.0).all()
    with pytest.raises(SwapUsageError, match="already"):
        nvmeswap.zero3.shard(model, Case().config(tmp_path))
    optimizer.close()


def test_model_that_its_user_sharded_on_meta_is_served(one_rank: None, tmp_path: Path) -> None:
    """Its groups stay as they are."""
    case = Case(steps=STEPS)
    mesh = init_device_mesh("cpu", (1,))

    def sharded() -> nn.Module:
        model = on_meta(case)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    model, optimizer = nvmeswap.zero3.shard(
        sharded(), case.config(tmp_path), initialise=initialise_as_built(case)
    )
    assert first_difference(train(model, optimizer, case), reference(False)) is None
    optimizer.close()


class Scaled(nn.Module):
    """As transformers' norms: no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(50))
        self.register_buffer("frequency", torch.arange(50.0), persistent=False)


class Pretrained(nn.Module):
    """With the face of transformers' PreTrainedModel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.other = Scaled(), nn.Linear(50, 50), nn.LayerNorm(50)

    def post_init(self) -> None: ...

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, Scaled):
            module.weight.data.fill_(1.0)
            module.frequency = torch.arange(50.0)


def test_models_of_transformers_initialise_their_modules(one_rank: None, tmp_path: Path) -> None:
    """By their own method; what that leaves out, by the module's."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50, 50), Pretrained())
    torch.manual_seed(1)
    model, optimizer = nvmeswap.zero3.shard(model, Case().config(tmp_path))
    inner = model[1]
    torch.manual_seed(1)
    nn.Linear(50, 50)
    assert torch.equal(inner.project.weight.full_tensor(), torch.empty(50, 50).normal_(std=0.02))
    assert (inner.norm.weight.full_tensor() == 1).all() and inner.norm.frequency[49] == 49
    assert (inner.other.weight.full_tensor() == 1).all()
    optimizer.close()


def nothing(module: nn.Module) -> None: ...


def the_child(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.fill_(1.0)


def raising(module: nn.Module) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("initialise", [None, nothing, the_child, raising])
@pytest.mark.parametrize("device", ["nvme", "none"])
def test_module_that_is_not_initialised_is_refused_by_name(
    one_rank: None, tmp_path: Path, initialise: Any, device: str
) -> None:
    """Nothing may train on what happened to be in memory."""
    model, config = on_meta(Case()), Case(params=device, optimizer=device).config(tmp_path)
    with pytest.raises(SwapUsageError, match="AwkwardModel") as raised:
        nvmeswap.zero3.shard(model, config, initialise=initialise)
    assert raised.value.fix and "initialise" in raised.value.fix
    assert not list(tmp_path.rglob("*.swp"))
    assert all(parameter.is_meta for parameter in model.parameters())
    nvmeswap.zero3.shard(model, config, initialise=initialise_as_built(Case()))[1].zero_grad()


def test_set_up_that_fails_gives_its_memory_back(one_rank: None, tmp_path: Path) -> None:
    """It had taken its slots, and written a part.  field case B02"""
    def initialise(module: nn.Module) -> None:
        if module is model[2]:
            raise MemoryError("no more")
        module.reset_parameters()  # type: ignore[operator]

    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    before = locked_kib()
    with pytest.raises(SwapUsageError):
        nvmeswap.zero3.shard(model, Case().config(tmp_path), initialise=initialise)
    assert locked_kib() == before
    assert not list(tmp_path.rglob("*.swp"))


def test_buffer_that_nobody_initialises_is_refused_by_name(one_rank: None, tmp_path: Path) -> None:
    """As a table of rotary frequencies that only the constructor fills."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].register_buffer("table", torch.arange(8))
    with pytest.raises(SwapUsageError, match="table"):
        nvmeswap.zero3.shard(model, Case().config(tmp_path))
    assert not list(tmp_path.rglob("*.swp"))


def test_weights_are_converted_to_a_model_in_bf16(one_rank: None, tmp_path: Path) -> None:
    """Files have one precision, the model another."""
    case = Case()
    save_in_two(build(case), tmp_path)
    model = on_meta(case).bfloat16()
    model, optimizer = nvmeswap.zero3.shard(model, case.config(tmp_path), weights=tmp_path)
    for name, values in build(case).bfloat16().state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), values), name
    optimizer.close()


class InitialisesItsChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.inner.weight)


class InitialisesByApply(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.zeros_(parameter)


@pytest.mark.parametrize("kind", [InitialisesItsChildren, InitialisesByApply])
def test_initialiser_that_would_not_be_called_is_refused_by_name(
    one_rank: None, tmp_path: Path, kind: type[nn.Module]
) -> None:
    """Built in memory the weights would be others."""
    with torch.device("meta"):
        model = kind()
    with pytest.raises(SwapUsageError, match="which nobody calls here"):
        nvmeswap.zero3.shard(model, Case().config(tmp_path))
