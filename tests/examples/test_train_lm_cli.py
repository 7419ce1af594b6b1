"""The main job as a person types it: tiny, but through every floor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvmeswap.examples.arguments import parse
from tests.launch import run_module

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--dim", "32", "--layers", "2", "--heads", "4", "--sequence-length", "16",
        "--batch-size", "2", "--steps", "3", "--sub-group-size", "5000"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NAME = "nvmeswap.examples.train_lm"
JOB = ["-m", NAME]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, one thread a process: the machine may have two cores only."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=240
    )


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """As it is started by hand, but forked: the imports of a new process take longer than it."""
    return run_module(NAME, *TINY, *options, folder=folder)


def assert_equal_to_ram(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "loss equals in-RAM run: yes"


def test_job_without_offload_trains_and_writes_its_figures(tmp_path: Path) -> None:
    """The yardstick must work alone: a broken one would make every comparison meaningless."""
    result = train(tmp_path, "--offload", "none", "--json", "figures.json")
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "figures.json").read_text())
    assert len(written["losses"]) == 3
    assert written["figures"]["parameter_count"] > 0
    assert written["figures"]["read_nbytes"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_job_from_nvme_equals_the_run_in_ram(tmp_path: Path, precision: str) -> None:
    """Promise one: a run with its state on NVMe equals the run in RAM, bit for bit."""
    options = ["--check", "--precision", precision, "--json", "figures.json"]
    if precision == "fp32":
        result = train(tmp_path, *options)
    else:
        result = run([sys.executable, *JOB, *TINY, *options], tmp_path)
    assert_equal_to_ram(result)
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["read_nbytes"] > 0
    assert figures["write_nbytes"] > 0


def test_job_from_cpu_equals_the_run_in_ram(tmp_path: Path) -> None:
    assert_equal_to_ram(train(tmp_path, "--offload", "cpu", "--check"))


@pytest.mark.slow
def test_two_ranks_with_uneven_shards_equal_the_run_in_ram(tmp_path: Path) -> None:
    """257 tokens over two ranks are uneven; each micro-batch's gradient leaves by our hooks."""
    command = [*TORCHRUN, "--nproc-per-node", "2", *JOB, *TINY, "--check",
               "--accumulation", "4", "--activation-checkpointing"]
    assert_equal_to_ram(run(command, tmp_path))


def test_job_when_a_loss_differs_says_where_and_fails(tmp_path: Path) -> None:
    """A check that can't fail proves nothing: here the swapped run starts from another weight."""
    script = tmp_path / "tampered.py"
    script.write_text(TAMPERED)
    result = run([sys.executable, str(script), *TINY, "--check"], tmp_path)
    assert result.returncode == 1, result.stderr
    assert result.stdout.splitlines()[-1] == "loss equals in-RAM run: no"
    assert "loss of step 1:" in result.stdout


TAMPERED = """
import torch
from nvmeswap.examples import train_lm

build_model, builds = train_lm.build_model, []

def tampered(options):
    model = build_model(options)
    if not builds:
        with torch.no_grad():
            model.head.weight[5, 3] += 0.25
    builds.append(model)
    return model

train_lm.build_model = tampered
train_lm.leave(train_lm.main())
"""


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--heads", "5"], "--heads 5"),
        (["--offload", "none", "--check"], "--check"),
        (["--offload", "cpu", "--nvme-path", "."], "--nvme-path"),
        (["--offload", "none", "--max-in-cpu", "10"], "--max-in-cpu"),
        (["--backend", "nccl"], "--backend nccl"),
        (["--text", "nothing.txt"], "nothing.txt"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_job_when_options_conflict_names_the_culprit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    culprit: str,
) -> None:
    """Nothing is started, and nothing is left behind, by a command that can't be served."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        parse([*TINY, *options])
    assert stopped.value.code == 2
    assert culprit in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_job_when_nvme_path_is_missing_says_so_without_a_traceback(tmp_path: Path) -> None:
    result = train(tmp_path, "--nvme-path", "missing")
    assert result.returncode == 1
    assert "missing" in result.stderr
    assert "Traceback" not in result.stderr
