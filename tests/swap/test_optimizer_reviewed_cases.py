"""What a review found: each would have been a wrong result, a hang or a dead end."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nvmeswap import OverlapSettings, SwappedOptimizer
from nvmeswap.errors import SwapConfigError, SwapManifestError, SwapUsageError
from tests.swap.conftest import Bench, set_gradients

MakeParameters = Callable[..., list[torch.nn.Parameter]]


def test_rate_set_between_backward_and_step_counts_from_the_next_one(tmp_path: Path) -> None:
    """With updates during backward part of a tensor would have been stepped with each."""

    def run(overlap: OverlapSettings | None, when: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(90, 90) for _ in range(4)])
        folder = tmp_path / f"{overlap is None}{when}"
        folder.mkdir()
        optimizer = SwappedOptimizer(
            torch.optim.AdamW, model.parameters(), lr=0.1, nvme_path=folder, sub_group_size=4096,
            pin_memory=False, overlap=overlap,
        )
        for step in range(4):
            if when == "before":
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            model(torch.ones(3, 90)).square().mean().backward()
            if when == "between":
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    expected = run(None, "before")
    assert all(map(torch.equal, run(OverlapSettings(), "between"), expected))


@pytest.mark.parametrize(
    "settings", [{"state_dtype": torch.int32}, {"update_thread_count": 0}], ids=str
)
def test_setting_that_can_not_work_is_refused(
    tmp_path: Path, parameters: MakeParameters, settings: dict[str, object]
) -> None:
    """It would have given wrong values, or a constructor that never ends."""
    with pytest.raises(SwapConfigError):
        SwappedOptimizer(
            torch.optim.AdamW, parameters([10]), nvme_path=tmp_path, **settings  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("overlap", [None, OverlapSettings()], ids=["after", "during"])
def test_sparse_gradient_is_refused_before_anything_is_updated(
    tmp_path: Path, overlap: OverlapSettings | None
) -> None:
    """In the middle of the step there would have been no way back."""
    torch.manual_seed(0)
    table, head = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 8)
    optimizer = SwappedOptimizer(
        torch.optim.SGD, [*head.parameters(), *table.parameters()], lr=0.1, nvme_path=tmp_path,
        pin_memory=False, overlap=overlap,
    )
    values = [parameter.detach().clone() for parameter in table.parameters()]
    with pytest.raises(SwapUsageError, match="sparse"):
        head(table(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, table.parameters(), values))
    if overlap is None:
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("first", [torch.float16, torch.float32])
def test_group_of_another_dtype_is_added_where_all_stays_in_memory(
    tmp_path: Path, parameters: MakeParameters, first: torch.dtype
) -> None:
    """Its slots were of another size, and every later step would have waited in vain."""
    ours = parameters([9 * 4096 + 7], dtype=first)
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, ours, lr=0.1, nvme_path=tmp_path, ratio=0.0, sub_group_size=4096,
        buffer_count=1, pin_memory=False, swap=None,
    )
    set_gradients(ours, 0)
    optimizer.step()
    added = parameters([20_000])
    optimizer.add_param_group({"params": added})
    before = added[0].detach().clone()
    set_gradients([*ours, *added], 1)
    optimizer.step()
    assert not torch.equal(added[0], before)
    optimizer.close()


def test_negative_zero_is_a_value_of_its_own(bench: Bench) -> None:
    """It would have become a positive one where a master is made from the parameter."""
    ours = torch.nn.Parameter(torch.full((5000,), -0.0, dtype=torch.float16))
    optimizer = bench.optimizer(torch.optim.SGD, [ours], lr=0.0)
    with torch.no_grad():
        ours.copy_(torch.full((5000,), -0.0))
    ours.grad = torch.zeros_like(ours)
    optimizer.step()
    assert bool(torch.signbit(ours).all()) and bool(torch.signbit(optimizer.read_state(ours)).all())


def test_state_file_with_damaged_metadata_is_refused(
    tmp_path: Path, parameters: MakeParameters
) -> None:
    """A KeyError tells nobody what to do."""
    optimizer = SwappedOptimizer(
        torch.optim.SGD, parameters([10]), lr=0.1, nvme_path=tmp_path, pin_memory=False
    )
    path = tmp_path / "state"
    for metadata in ({}, {"param_groups": "[]"}, {"param_groups": "[", "scalars": json.dumps({})}):
        save_file({"a": torch.ones(1)}, path, {"format": "nvmeswap.optimizer/1", **metadata})
        with pytest.raises(SwapManifestError):
            optimizer.load(path)
    optimizer.close()


def test_state_dict_reads_each_sub_group_once(bench: Bench, parameters: MakeParameters) -> None:
    """One pass for each parameter and state read the drive several times over."""
    ours = parameters([3000] * 20, dtype=torch.bfloat16)
    optimizer = bench.adamw(ours, buffer_count=1)
    set_gradients(ours, 0)
    optimizer.step()
    before = optimizer.stats().read_nbytes
    optimizer.state_dict()
    stored_nbytes = optimizer.stats().write_nbytes
    assert optimizer.stats().read_nbytes - before <= stored_nbytes


@pytest.mark.parametrize("change", [lambda m: m.float(), lambda m: m.double()], ids=["f", "d"])
def test_parameter_of_another_kind_is_refused(
    tmp_path: Path, change: Callable[[torch.nn.Module], object]
) -> None:
    """It would have been updated no more, without a word."""
    model = torch.nn.Linear(8, 8).half()
    optimizer = SwappedOptimizer(
        torch.optim.SGD, model.parameters(), lr=0.1, nvme_path=tmp_path, pin_memory=False
    )
    change(model)
    set_gradients(model.parameters(), 0)
    with pytest.raises(SwapUsageError, match="built"):
        optimizer.step()
    model.half()
    set_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.close()


def test_writes_through_data_count_beside_a_whole_master(bench: Bench) -> None:
    """torch does not count them; the old master would have come back."""
    ours = torch.nn.Parameter(torch.randn(5000).half())
    optimizer = bench.optimizer(torch.optim.SGD, [ours], lr=1e-3)
    for step in range(2):
        set_gradients([ours], step)
        if step == 1:
            ours.data.zero_()
        optimizer.step()
    assert float(ours.detach().abs().max()) < 0.1


class MakesAStateLater(torch.optim.Optimizer):
    """As Lookahead does, in its fifth step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"])
                if state["step"] == 5:
                    state["slow"] = parameter.clone()


class CentresConvolutions(torch.optim.SGD):
    """Depends on the shape of a gradient, if it has four dimensions."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.dim() > 3:
                    parameter.grad.sub_(parameter.grad.mean((1, 2, 3), keepdim=True))
        return super().step(closure)


def test_state_that_comes_later_is_refused_when_it_comes(bench: Bench) -> None:
    """Taken for a scalar, each piece would have overwritten the other's."""
    ours = torch.nn.Parameter(torch.randn(10_000))
    optimizer = bench.optimizer(MakesAStateLater, [ours])
    with pytest.raises(SwapUsageError, match="slow"):
        for step in range(6):
            set_gradients([ours], step)
            optimizer.step()


def test_class_that_treats_convolutions_otherwise_is_refused(bench: Bench) -> None:
    """The proof on a matrix alone did not see it."""
    with pytest.raises(SwapUsageError, match="elementwise"):
        bench.optimizer(CentresConvolutions, [torch.nn.Parameter(torch.randn(10))], lr=0.1)


def test_group_whose_adding_was_interrupted_late_is_there_once(
    bench: Bench, parameters: MakeParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when all was done: added again it would have been updated twice in each step."""
    ours, theirs = parameters([5000, 9000]), parameters([5000, 9000])
    optimizer = bench.adamw(ours[:1])
    add = optimizer.swapper.add

    def interrupted(*arguments: Any) -> Any:
        add(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer.swapper, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.add_param_group({"params": ours[1:]})
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": ours[1:]})
    resident = torch.optim.AdamW(theirs, fused=True)
    for step in range(3):
        for params in (ours, theirs):
            set_gradients(params, step)
        optimizer.step()
        resident.step()
    assert all(map(torch.equal, ours, theirs))


def test_state_saved_by_an_old_torch_is_loaded(bench: Bench, parameters: MakeParameters) -> None:
    """It counted steps in numbers and had fewer options."""
    ours, theirs = parameters([5000]), parameters([5000])
    resident, optimizer = torch.optim.AdamW(theirs, fused=True), bench.adamw(ours)
    for params, each in ((theirs, resident), (ours, optimizer)):
        set_gradients(params, 0)
        each.step()
    saved = copy.deepcopy(resident.state_dict())
    saved["state"][0]["step"] = 1
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        saved["param_groups"][0].pop(name)
    optimizer.load_state_dict(saved)
    for params, each in ((theirs, resident), (ours, optimizer)):
        set_gradients(params, 1)
        each.step()
    assert torch.equal(ours[0], theirs[0])


def test_overlapping_optimizer_that_is_dropped_goes(
    tmp_path: Path, parameters: MakeParameters
) -> None:
    """Hooks on parameters would have kept its memory and files for as long as the model lives."""
    ours = parameters([5000])
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, ours, nvme_path=tmp_path, pin_memory=False, overlap=OverlapSettings()
    )
    ours[0].square().sum().backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
