"""Tests that need several ranks: one start of real processes for many cases.

`run_ranks(n, "name", folder, **arguments)` runs the function `name` of this file on n ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from nvmeswap import SwapError
from nvmeswap.errors import SwapUsageError
from tests import launch
from tests.oracle import first_difference
from tests.zero3 import programs
from tests.zero3.cases import Case, build, run_in_ram, run_swapped
from tests.zero3.meta_ranks import from_meta
from tests.zero3.scaled import all_agree


def run_ranks(
    ranks: int, name: str, folder: Path, module: str = "tests.zero3.ranks", **arguments: Any
) -> list[Any]:
    """Results by rank; fails with the tracebacks of all ranks that have one. `module`: which adds
    functions of its own."""
    nvme_path = folder / "nvme"
    nvme_path.mkdir(exist_ok=True)
    return launch.run_ranks(ranks, run_function, folder, name, nvme_path, module, arguments)


def run_function(name: str, nvme_path: Path, module: str, arguments: dict[str, Any]) -> Any:
    """On a rank."""
    importlib.import_module(module)
    torch._dynamo.config.disable = False  # which `launch.environment` has set for DeepSpeed
    return FUNCTIONS[name](nvme_path, **arguments)


def equals_ram(nvme_path: Path, cases: list[Case]) -> None:
    """Each case, swapped and in RAM."""
    for case in cases:
        difference = first_difference(run_swapped(case, nvme_path), run_in_ram(case))
        assert difference is None, f"{case}: {difference}"


def everything_equals_ram(
    nvme_path: Path, cases: list[Case], names: dict[str, int]
) -> list[str]:
    """Each case, and each program with its number of slots; returns what
    `ranks_choose_other_experts` does."""
    import tests.zero3.groupings
    import tests.zero3.loops
    import tests.zero3.structures  # noqa: F401

    torch.set_num_threads(1)
    equals_ram(nvme_path, cases)
    for name, buffer_count in names.items():
        program = programs.Program.known[name]
        ours = programs.run_swapped(program(), nvme_path, buffer_count)
        difference = first_difference(ours, programs.run_in_ram(program()))
        assert difference is None, f"{name}: {difference}"
    if dist.get_world_size() == 4:
        shards_kept_on_two_ranks_are_refused(nvme_path)
    return ranks_choose_other_experts(nvme_path)


def shards_kept_on_two_ranks_are_refused(nvme_path: Path) -> None:
    """FSDP2 has no all-gather hooks for them."""
    import nvmeswap.zero3

    program = programs.Program()
    model, mesh = program.build(), program.mesh()
    program.fully_shard(model, mesh, reshard_after_forward=2)
    try:
        nvmeswap.zero3.shard(model, programs.config(program, nvme_path), mesh)
    except SwapUsageError as error:
        assert "reshard_after_forward" in str(error)
    else:
        raise AssertionError("nothing was raised")


def ranks_choose_other_experts(nvme_path: Path) -> list[str]:
    """Each rank runs another expert in the first of three steps, each expert being a group of its
    own; returns the names of the errors."""
    import nvmeswap.zero3
    from tests.zero3.structures import ExpertsEachInAGroup

    program = ExpertsEachInAGroup()
    model, mesh = programs.sharded(program)
    model, optimizer = nvmeswap.zero3.shard(model, programs.config(program, nvme_path), mesh)
    raised = []
    for step in range(3):
        for block in model.blocks:
            block.chosen = [dist.get_rank() if step == 0 else 2]
        model(torch.ones(4, programs.DIM)).sum().backward()
        try:
            optimizer.step()
        except SwapError as error:
            raised.append(type(error).__name__)
        optimizer.zero_grad()
    return raised


def one_rank_reads_garbage(nvme_path: Path, mesh_shapes: list[tuple[int, int]]) -> list[str]:
    """On each mesh: rank 1's parameter file is damaged between two steps; returns the names of the
    errors. On (2, 1) each rank has all of every parameter, and lends it to FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    raised = []
    for shape in mesh_shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        folder = nvme_path / "x".join(map(str, shape))
        folder.mkdir(exist_ok=True)
        raised.append(_garbage_on_rank_1(folder, mesh))
    return raised


def _garbage_on_rank_1(nvme_path: Path, mesh: Any) -> str:
    import nvmeswap.zero3

    case = Case(buffer_count=1)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(nvme_path), mesh)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.flush()
    before = {n: v.full_tensor().clone() for n, v in model.state_dict().items()}
    if dist.get_rank() == 1:
        (path,) = nvme_path.rglob("rank00001/params.swp")
        with path.open("r+b") as file:
            file.write(b"\xa5" * path.stat().st_size)
    dist.barrier()
    model(tokens).sum().backward()
    try:
        optimizer.step()
    except SwapError as error:
        after = {n: v.full_tensor() for n, v in model.state_dict().items()}
        assert all(torch.equal(before[name], after[name]) for name in before)
        return type(error).__name__
    return "nothing"


def one_rank_is_torn(nvme_path: Path) -> list[str]:
    """Rank 1's states are of no use, as after an update that broke in the middle; returns the names
    of the errors of two steps."""
    import nvmeswap.zero3

    case = Case(buffer_count=1)
    model, optimizer = nvmeswap.zero3.shard(build(case), case.config(nvme_path))
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.swapper.tear("an update broke in the middle")
    raised = []
    for _ in range(2):
        try:
            optimizer.step()
        except SwapError as error:
            raised.append(type(error).__name__)
    return raised


def void_pass_is_refused(nvme_path: Path) -> None:
    """Rank 1 can't read in one forward; afterwards the run goes on as an undisturbed one does."""
    import nvmeswap.zero3

    weights = []
    for disturbed in (True, False):
        case = Case(buffer_count=1)
        model, optimizer = nvmeswap.zero3.shard(build(case), case.config(nvme_path))
        tokens = torch.full((2, 3), 1 + dist.get_rank())
        if disturbed:
            (path,) = nvme_path.rglob(f"rank0000{dist.get_rank()}/params.swp")
            before = path.read_bytes()
            if dist.get_rank() == 1:
                with path.open("r+b") as file:
                    file.write(bytes(len(before)))
            model(tokens).sum().backward()
            with path.open("r+b") as file:
                file.write(before)
            for expected in (SwapError, SwapUsageError):
                try:
                    optimizer.step()
                except expected:
                    continue
                raise AssertionError(f"no {expected.__name__}")
            optimizer.zero_grad()
        for _ in range(2):
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append({n: v.full_tensor().clone() for n, v in model.state_dict().items()})
        optimizer.close()
    assert all(value.isfinite().all() for value in weights[0].values())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class FailsOnRank1(torch.optim.SGD):
    """In its update of a parameter of more than one element, as someone's own might."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails and dist.get_rank() == 1:
            raise ZeroDivisionError
        super().step(closure)


def others_hear_of_anything(nvme_path: Path) -> list[str]:
    """A path that only rank 0 has, optimizers that differ, and one that breaks on rank 1, in this
    order; returns the names of the errors' classes."""
    import nvmeswap.zero3

    def shard(optimizer: Any = None, **changes: Any) -> Any:
        case = Case(extra=changes)
        return nvmeswap.zero3.shard(build(case), case.config(nvme_path), optimizer=optimizer)

    raised = []
    missing = {"device": "nvme", "nvme_path": str(nvme_path / "missing")}
    only_here = {"zero_optimization": {"stage": 3, "offload_optimizer": missing}}
    for attempt in (
        lambda: shard(**(only_here if dist.get_rank() == 1 else {})),
        lambda: shard([torch.optim.SGD, torch.optim.AdamW][dist.get_rank()]),
        lambda: step(*shard(FailsOnRank1)),
    ):
        try:
            attempt()
        except Exception as error:
            raised.append(type(error).__name__)
    return raised


def step(model: Any, optimizer: Any) -> None:
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    FailsOnRank1.fails = True
    optimizer.step()


def set_up_fails_on_rank_1(nvme_path: Path) -> str:
    """A budget of one byte on rank 1; returns the error's class name."""
    import nvmeswap.zero3

    budget = {"host_memory_nbytes": 1} if dist.get_rank() == 1 else {}
    case = Case(extra={"nvmeswap": budget})
    try:
        nvmeswap.zero3.shard(build(case), case.config(nvme_path))
    except SwapError as error:
        assert not list(nvme_path.rglob(f"rank0000{dist.get_rank()}/*.swp"))
        return type(error).__name__
    return "nothing"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        all_agree, equals_ram, everything_equals_ram, from_meta, one_rank_is_torn,
        one_rank_reads_garbage, others_hear_of_anything, set_up_fails_on_rank_1,
        void_pass_is_refused,
    )
}
