"""What would train wrongly without a word raises, and leaves the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import nvmeswap.zero3
from nvmeswap.errors import SwapUsageError
from tests.zero3.programs import DIM, Program, check_slots, config, sharded
from tests.zero3.structures import SmallAdapters

Trained = tuple[nn.Module, Any]


@pytest.fixture
def trained(one_rank: None, tmp_path: Path) -> Iterator[Trained]:
    """A swapped model and its optimizer."""
    program = Program()
    model, mesh = sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, config(program, tmp_path), mesh)
    yield model, optimizer
    optimizer.close()


def backward(model: nn.Module) -> None:
    model(torch.ones(4, DIM)).square().sum().backward()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_step_of_another_optimizer_is_refused(
    trained: Trained, cls: type[torch.optim.Optimizer]
) -> None:
    """It would be a second one, with states of its own.  field case D09"""
    model, optimizer = trained
    other = cls(model.parameters(), lr=0.1)
    before = weights_of(model)
    backward(model)
    with pytest.raises(SwapUsageError, match="nvmeswap") as raised:
        other.step()
    assert raised.value.fix
    after = weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.step()


def test_optimizer_of_another_model_steps_as_ever(trained: Trained) -> None:
    """Two models, one of them resident, as in a GAN."""
    other = nn.Linear(3, 3)
    before = other.weight.detach().clone()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(other.weight, before)


def test_optimizer_built_before_sharding_is_refused_in_its_step(
    one_rank: None, tmp_path: Path
) -> None:
    """field case D09"""
    program = Program()
    model, mesh = sharded(program)
    early = torch.optim.AdamW(model.parameters())
    model, optimizer = nvmeswap.zero3.shard(model, config(program, tmp_path), mesh)
    backward(model)
    with pytest.raises(SwapUsageError):
        early.step()
    optimizer.close()


def test_loading_by_assignment_is_refused_and_by_copy_is_not(trained: Trained) -> None:
    """Assigned parameters would be resident, and nobody would train them."""
    model, optimizer = trained
    before = weights_of(model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with pytest.raises(SwapUsageError, match="assign"):
        model.load_state_dict(state, assign=True)
    backward(model)
    optimizer.step()
    assert not torch.equal(weights_of(model)["head.weight"], before["head.weight"])
    model.load_state_dict(state)
    after = weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_parameter_that_was_replaced_is_refused_in_the_next_step(trained: Trained) -> None:
    model, optimizer = trained
    model.head.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(SwapUsageError, match=r"head\.bias"):
        optimizer.step()


def test_copy_of_the_model_is_refused(trained: Trained) -> None:
    """It would read and write the same shards."""
    model, _ = trained
    with pytest.raises((AssertionError, SwapUsageError, RuntimeError)):
        copy.deepcopy(model)
    backward(model)


def test_frozen_parameters_are_never_written_and_read_at_their_use_only(
    one_rank: None, tmp_path: Path
) -> None:
    """field cases N04, N05"""
    program = SmallAdapters()
    settings = config(program, tmp_path)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    settings["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    model, mesh = sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, settings, mesh)
    on_nvme = optimizer.swap.stats().store
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    after_step = optimizer.swap.stats().store
    assert after_step.write_nbytes == on_nvme.write_nbytes > 0
    assert after_step.read_nbytes > on_nvme.read_nbytes
    adapters = {
        name: value.full_tensor().clone()
        for name, value in model.state_dict().items()
        if name.endswith(("up", "down"))
    }
    assert len(adapters) == 6
    assert optimizer.swap.stats().store.read_nbytes == after_step.read_nbytes
    optimizer.close()


def test_parameters_stay_the_objects_they_were(one_rank: None, tmp_path: Path) -> None:
    """Code elsewhere holds them, and what it has hung on them.  field case D10"""
    program = SmallAdapters()
    model, mesh = sharded(program)
    before = dict(model.named_parameters())
    trained = {name for name, parameter in before.items() if parameter.requires_grad}
    for name, parameter in before.items():
        parameter.mark = name  # type: ignore[attr-defined]
    model, optimizer = nvmeswap.zero3.shard(model, config(program, tmp_path), mesh)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(after[name] is parameter for name, parameter in before.items())
        assert all(parameter.mark == name for name, parameter in after.items())
        assert {name for name, parameter in after.items() if parameter.requires_grad} == trained
    optimizer.close()


def test_many_steps_take_no_more_memory_than_few(one_rank: None, tmp_path: Path) -> None:
    """Evaluations and a failing forward between them.  field case B10"""
    program = Program()
    model, mesh = sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, config(program, tmp_path), mesh)
    resident = []
    for _ in range(50):
        backward(model)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(4, DIM))
            with pytest.raises(RuntimeError):
                model(torch.ones(4, DIM + 1))
        check_slots(optimizer.swap.stats())
        resident.append(psutil.Process().memory_info().rss)
    assert resident[-1] - resident[20] < 4 << 20
    optimizer.close()


def test_parameter_that_fsdp_is_to_ignore_is_not_left_untrained(
    one_rank: None, tmp_path: Path
) -> None:
    program = Program()
    model = program.build()
    fully_shard(model, ignored_params={model.head.weight})
    with pytest.raises(SwapUsageError, match=r"head\.weight is to be trained, but not sharded"):
        nvmeswap.zero3.shard(model, config(program, tmp_path))
