"""Whole DeepSpeed scripts: with nvmeswap installed and their tensors on NVMe they give the losses,
weights and moments of DeepSpeed's CPU offload, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.cases import CASES, Case, zero
from tests.deepspeed.launch import run_ranks
from tests.oracle import Run, first_difference

WHOLE = zero(sub_group_size=1_000_000_000)


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], list[Run]]:
    """in_ram(case, ranks): by rank, what DeepSpeed's CPU offload gives; run once for all that are
    alike."""

    @functools.cache
    def run(script: str, ranks: int) -> list[Run]:
        return run_ranks(references[script], ranks, tmp_path_factory.mktemp("ram"), None)

    references: dict[str, Case] = {}

    def of(case: Case, ranks: int) -> list[Run]:
        name = case.script if case.alike else repr(case)
        references.setdefault(name, case)
        return run(name, ranks)

    return of


def assert_equal(ours: list[Run], reference: list[Run]) -> None:
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        difference = first_difference(mine, theirs)
        assert difference is None, f"rank {rank}: {difference}"


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, case in CASES.items() for ranks in case.ranks]
)
def test_script_on_nvme_equals_cpu_offload(
    name: str, ranks: int, tmp_path: Path, in_ram: Callable[[Case, int], list[Run]]
) -> None:
    ours = run_ranks(CASES[name], ranks, tmp_path, nvme_path(tmp_path))
    assert_equal(ours, in_ram(CASES[name], ranks))


def nvme_path(folder: Path) -> Path:
    path = folder / "nvme"
    path.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_resumed_from_a_checkpoint_goes_on_as_the_other(tmp_path: Path, ranks: int) -> None:
    """In new processes; with Adam's moments and its count of steps."""
    place = nvme_path(tmp_path)
    saved = run_ranks(Case("checkpoint_saved", WHOLE), ranks, tmp_path, place)
    resumed = run_ranks(Case("checkpoint_resumed", WHOLE), ranks, tmp_path, place)
    assert_equal(resumed, [replace(each, losses=each.losses[2:]) for each in saved])


def test_two_jobs_share_a_folder(
    tmp_path: Path, in_ram: Callable[[Case, int], list[Run]]
) -> None:
    """At once, with one "nvme_path"; neither reads what the other wrote."""
    place = nvme_path(tmp_path)
    cases = [CASES["trains"], CASES["frozen base"]]
    with ThreadPoolExecutor(len(cases)) as threads:
        started = []
        for case in cases:
            folder = tmp_path / case.script
            folder.mkdir()
            started.append(threads.submit(run_ranks, case, 1, folder, place))
        for case, each in zip(cases, started, strict=True):
            assert_equal(each.result(), in_ram(case, 1))
