"""Whole DeepSpeed scripts: with nvmeswap installed and their tensors on NVMe they give the losses,
weights and moments of DeepSpeed's CPU offload, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deepspeed.cases import CASES, PIPELINED, Case, Json, merged, offload, zero
from tests.deepspeed.launch import run_ranks
from tests.launch import environment
from tests.oracle import Run, first_difference

SCRIPT = Path(__file__).with_name("script.py")
LAUNCH_TIMEOUT_S = 120
WHOLE = zero(sub_group_size=1_000_000_000)


@pytest.fixture(scope="module")
def in_ram(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, int], list[Run]]:
    """in_ram(case, ranks): by rank, what DeepSpeed's CPU offload gives; once for all like it."""

    known: dict[tuple[str, int], list[Run]] = {}

    def run(case: Case, ranks: int) -> list[Run]:
        key = repr(case.in_ram), ranks
        if key not in known:
            known[key] = run_ranks(case.in_ram, ranks, tmp_path_factory.mktemp("ram"), None)
        return known[key]

    return run


def assert_equal(ours: list[Run], reference: list[Run]) -> None:
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        difference = first_difference(mine, theirs)
        assert difference is None, f"rank {rank}: {difference}"


# Each costs two seconds of both cores; NVMESWAP_ALL_SCRIPTS=1 runs those as well that differ from
# another one in a setting alone.
BY_HAND = () if os.environ.get("NVMESWAP_ALL_SCRIPTS") else (
    "one sub-group", "buffers smaller than a part", "pipelined", "pipelined reads",
    "pipelined writes", "some parameters go back to RAM", "blocks of 8 MiB, no prefetch",
    "clipped", "bf16", "gradient accumulation, one sub-group", "evaluation between steps",
    "experts left out, one sub-group", "weights set before the engine", "states read and set",
    "several engines", "Muon, momentum in RAM",
)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name, case in CASES.items() if name not in BY_HAND for ranks in case.ranks],
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


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"scheduler": {"type": "WarmupDecayLR", "params": {
            "total_num_steps": 8, "warmup_num_steps": 2, "warmup_max_lr": 0.01}}}),
        (2, {}),
        (2, merged(WHOLE, offload(None, PIPELINED))),
    ],
)
def test_run_resumed_from_a_checkpoint_goes_on_as_the_other(
    tmp_path: Path, ranks: int, changes: Json
) -> None:
    """In new processes; with Adam's moments and its count of steps, also of small sub-groups."""
    place = nvme_path(tmp_path)
    saved = run_ranks(Case("checkpoint_saved", changes), ranks, tmp_path, place)
    resumed = run_ranks(Case("checkpoint_resumed", changes), ranks, tmp_path, place)
    assert_equal(resumed, [replace(each, losses=each.losses[2:]) for each in saved])


def test_checkpoint_has_the_frozen_base(tmp_path: Path) -> None:
    """DeepSpeed saves a placeholder of one element for what is frozen and on NVMe.

    # field case F08
    """
    place = nvme_path(tmp_path)
    saved = run_ranks(Case("adapted_checkpoint_saved"), 2, tmp_path, place)
    resumed = run_ranks(Case("adapted_checkpoint_resumed"), 2, tmp_path, place)
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


def test_script_is_started_by_a_launcher(
    tmp_path: Path, in_ram: Callable[[Case, int], list[Run]]
) -> None:
    """Its file and its JSON as they are, after `-m nvmeswap.deepspeed`."""
    json_path, losses_path = tmp_path / "ds.json", tmp_path / "losses"
    json_path.write_text(json.dumps(CASES["trains"].json(nvme_path(tmp_path))))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "nvmeswap.deepspeed", str(SCRIPT), "--deepspeed", "--deepspeed_config",
        str(json_path), str(losses_path),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True,
                          timeout=LAUNCH_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    for rank, reference in enumerate(in_ram(CASES["trains"], 2)):
        losses = literal_eval(losses_path.with_suffix(f".{rank}").read_text())
        assert losses == reference.losses[:-1]
