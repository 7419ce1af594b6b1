"""A folder of checkpoints always has the last complete one, and nothing that only looks like it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nvmeswap.zero3
from nvmeswap.errors import (
    SwapManifestError,
    SwapOwnerError,
    SwapPathError,
    SwapReadError,
    SwapUsageError,
)
from tests.zero3.cases import Case, build
from tests.zero3.checkpoint_ranks import everything, start, train, unequal


@pytest.fixture
def run(one_rank: None, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A model and its optimizer after one step."""
    (tmp_path / "nvme").mkdir()
    model, optimizer = start("bf16 beside fp32", tmp_path / "nvme")
    train(model, optimizer, 0, 1)
    yield model, optimizer
    optimizer.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def damage(path: Path) -> bytes:
    """Other bytes, as many; returns those that were there."""
    before = path.read_bytes()
    path.write_bytes(b"\xa5" * len(before))
    return before


def test_save_that_fails_leaves_the_older_one_and_nothing_else(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    """field case F03"""
    model, optimizer = run
    folder = tmp_path / "saved"
    nvmeswap.zero3.save(model, optimizer, folder)
    expected = everything(model, optimizer)
    train(model, optimizer, 1, 1)
    optimizer.flush()
    (swap,) = tmp_path.rglob("optimizer.swp")
    damage(swap)
    with pytest.raises(SwapReadError):
        nvmeswap.zero3.save(model, optimizer, folder)
    assert names(folder) == {"step-00000001"}
    assert nvmeswap.zero3.load(model, optimizer, folder).step == 1
    assert unequal(everything(model, optimizer), expected) == []


def test_incomplete_ones_are_never_taken_and_leftovers_are_removed_by_the_next_save(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    folder = tmp_path / "saved"
    assert nvmeswap.zero3.latest(folder) is None
    first = nvmeswap.zero3.save(model, optimizer, folder).wait()
    left = folder / ".step-00000009.0123abcd.partial"
    left.mkdir()
    (left / "__0_00000_0.distcp").write_bytes(b"half")
    unmarked = nvmeswap.zero3.save(model, optimizer, folder, step=7).wait()
    (unmarked / "complete.json").unlink()
    (folder / "mine").mkdir()
    (folder / ".step-notes").write_text("foreign")
    assert not left.exists()
    assert nvmeswap.zero3.latest(folder) == first
    assert nvmeswap.zero3.load(model, optimizer, folder).path == first
    nvmeswap.zero3.save(model, optimizer, folder, step=7)
    assert names(folder) == {
        "step-00000001", "step-00000007", "step-00000007.2", "mine", ".step-notes",
    }


def test_as_many_older_ones_are_kept_as_asked_and_a_step_is_kept_once(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    folder = tmp_path / "saved"
    for step in (1, 2, 3, 3):
        nvmeswap.zero3.save(model, optimizer, folder, step=step)
    assert names(folder) == {"step-00000001", "step-00000002", "step-00000003.2"}
    nvmeswap.zero3.save(model, optimizer, folder, step=4, keep=1)
    assert names(folder) == {"step-00000003.2", "step-00000004"}
    nvmeswap.zero3.save(model, optimizer, folder, step=5, keep=0)
    assert names(folder) == {"step-00000005"}


def test_after_going_back_the_newest_is_not_the_largest_step(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    folder = tmp_path / "saved"
    for step in (10, 20):
        nvmeswap.zero3.save(model, optimizer, folder, step=step, extra=f"from {step}")
    assert nvmeswap.zero3.load(model, optimizer, folder, step=10).extra == "from 10"
    nvmeswap.zero3.save(model, optimizer, folder, step=11)
    resumed = nvmeswap.zero3.load(model, optimizer, folder)
    assert (resumed.step, resumed.extra) == (11, None)


def test_two_savers_in_one_folder_are_told(run: tuple[Any, Any], tmp_path: Path) -> None:
    """field case F03"""
    model, optimizer = run
    folder = tmp_path / "saved"
    nvmeswap.zero3.save(model, optimizer, folder, step=1)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder / ".lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(SwapOwnerError):
        nvmeswap.zero3.save(model, optimizer, folder, step=2)
    other.kill()
    other.communicate()
    nvmeswap.zero3.save(model, optimizer, folder, step=2)
    assert names(folder) == {"step-00000001", "step-00000002"}


def test_nothing_there_is_an_error_unless_that_is_all_right(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    with pytest.raises(SwapPathError):
        nvmeswap.zero3.load(model, optimizer, tmp_path / "mistyped")
    resumed = nvmeswap.zero3.load(model, optimizer, tmp_path / "empty", missing_ok=True)
    assert (resumed.step, resumed.path) == (0, None)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SwapPathError):
        nvmeswap.zero3.save(model, optimizer, file)
    with pytest.raises(SwapUsageError):
        nvmeswap.zero3.save(model, optimizer, tmp_path / "saved", extra=lambda: None)
    assert not (tmp_path / "saved").exists()


def test_files_cut_short_are_found_before_anything_has_changed(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    path = nvmeswap.zero3.save(model, optimizer, tmp_path / "saved").wait()
    train(model, optimizer, 1, 1)
    before = everything(model, optimizer)
    victim = path / "__0_00001_0.distcp"
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 1)
    with pytest.raises(SwapManifestError) as raised:
        nvmeswap.zero3.load(model, optimizer, tmp_path / "saved")
    assert raised.value.field == "files"
    assert unequal(everything(model, optimizer), before) == []
    train(model, optimizer, 2, 1)


def test_load_that_fails_half_way_leaves_an_optimizer_that_refuses_until_one_succeeds(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    folder = tmp_path / "saved"
    path = nvmeswap.zero3.save(model, optimizer, folder).wait()
    expected = everything(model, optimizer)
    train(model, optimizer, 1, 1)
    victim = path / "__0_00002_0.distcp"
    before = damage(victim)
    with pytest.raises(SwapReadError):
        nvmeswap.zero3.load(model, optimizer, folder)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    with pytest.raises(SwapUsageError, match="loaded in part"):
        optimizer.step()
    with pytest.raises(SwapUsageError, match="loaded in part"):
        nvmeswap.zero3.save(model, optimizer, folder, step=9)
    victim.write_bytes(before)
    nvmeswap.zero3.load(model, optimizer, folder)
    assert unequal(everything(model, optimizer), expected) == []
    train(model, optimizer, 1, 1)


def test_without_memory_for_a_copy_it_warns_and_saves_at_once(
    one_rank: None, tmp_path: Path
) -> None:
    (tmp_path / "nvme").mkdir()
    budget = {"host_memory_nbytes": 2**19, "min_swap_nbytes": 1000}
    case = Case(bf16=True, buffer_count=1, extra={"nvmeswap": budget})
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(tmp_path / "nvme"))
    train(model, optimizer, 0, 1)
    with pytest.warns(UserWarning, match="budget"):
        saving = nvmeswap.zero3.save(model, optimizer, tmp_path / "saved", asynchronous=True)
    assert saving.done()
    assert nvmeswap.zero3.latest(tmp_path / "saved") == saving.wait()
    optimizer.close()


class WithHead(torch.nn.Module):
    def __init__(self, *, width: int = 40, bias: bool = True, ties: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(64, width, bias=bias)])
        self.first = torch.nn.Linear(64, 64, bias=False)
        self.second = torch.nn.Linear(64, 64, bias=False)
        if ties:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.second(self.first(x)))


def sharded(folder: Path, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    folder.mkdir(exist_ok=True)
    return nvmeswap.zero3.shard(WithHead(**options), Case().config(folder), optimizer=optimizer)


@pytest.mark.parametrize(
    ("field", "optimizer", "options"),
    [
        ("shape", torch.optim.AdamW, {"width": 41}),
        ("unexpected", torch.optim.AdamW, {"bias": False}),
        ("tied", torch.optim.AdamW, {"ties": True}),
        ("optimizer", torch.optim.Adagrad, {}),
        ("param_groups", (torch.optim.AdamW, {"amsgrad": True}), {}),
    ],
)
def test_another_model_or_optimizer_is_refused_by_what_differs(
    one_rank: None, tmp_path: Path, field: str, optimizer: Any, options: dict[str, Any]
) -> None:
    """field case F07"""
    model, first = sharded(tmp_path / "nvme")
    model(torch.ones(2, 64)).sum().backward()
    first.step()
    nvmeswap.zero3.save(model, first, tmp_path / "saved")
    other, second = sharded(tmp_path / "nvme", optimizer, **options)
    with pytest.raises(SwapManifestError) as raised:
        nvmeswap.zero3.load(other, second, tmp_path / "saved")
    assert raised.value.field == field
    other(torch.ones(2, 64)).sum().backward()
    second.step()  # it is as it was
    first.close()
    second.close()


def test_missing_names_are_told(one_rank: None, tmp_path: Path) -> None:
    model, first = sharded(tmp_path / "nvme", bias=False)
    nvmeswap.zero3.save(model, first, tmp_path / "saved")
    other, second = sharded(tmp_path / "nvme")
    with pytest.raises(SwapManifestError, match=r"blocks\.0\.bias") as raised:
        nvmeswap.zero3.load(other, second, tmp_path / "saved")
    assert raised.value.field == "missing"
    first.close()
    second.close()


def test_torchs_loader_onto_a_swapped_model_is_refused_not_ignored(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    """It copies parts into views; of a swapped shard those would be copies."""
    model, optimizer = run
    path = nvmeswap.zero3.save(model, optimizer, tmp_path / "saved").wait()
    train(model, optimizer, 1, 1)
    with pytest.raises(CheckpointException, match="a view of a swapped parameter"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)


def test_not_in_the_middle_of_a_step_and_not_for_another_optimizer(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    optimizer.flush()
    (swap,) = tmp_path.rglob("optimizer.swp")
    before = damage(swap)
    with pytest.raises(SwapReadError):
        optimizer.step()
    with pytest.raises(SwapUsageError, match="unfinished"):
        nvmeswap.zero3.save(model, optimizer, tmp_path / "saved")
    swap.write_bytes(before)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for call in (nvmeswap.zero3.save, nvmeswap.zero3.load):
        with pytest.raises(SwapUsageError, match="not swapped"):
            call(model, plain, tmp_path / "saved")


def test_it_can_be_saved_and_loaded_after_an_evaluation(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    """Which leaves the root's parameters gathered."""
    model, optimizer = run
    expected = everything(model, optimizer)
    for act in (nvmeswap.zero3.save, nvmeswap.zero3.load):
        evaluate(model)
        act(model, optimizer, tmp_path / "saved")
    evaluate(model)
    nvmeswap.zero3.export(model, optimizer, tmp_path / "exported")
    found = everything(model, optimizer)
    del found["seen"], expected["seen"]  # which counts forwards
    assert not unequal(found, expected)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))


def test_what_would_be_lost_without_a_word_is_refused(
    run: tuple[Any, Any], tmp_path: Path
) -> None:
    model, optimizer = run
    for step in (-1, 10.0, True):
        with pytest.raises(SwapUsageError, match="not the number of a step"):
            nvmeswap.zero3.save(model, optimizer, tmp_path / "saved", step=step)
    model.add_module("counter", HasExtraState())
    with pytest.raises(SwapUsageError, match="extra state"):
        nvmeswap.zero3.save(model, optimizer, tmp_path / "saved")


class HasExtraState(torch.nn.Module):
    def get_extra_state(self) -> int:
        return 1
