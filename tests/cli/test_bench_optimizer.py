"""`nvmeswap-bench optimizer`: phases, bytes, floor and memory of a step, and its trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.cli.bench.arguments import elements
from nvmeswap.cli.bench.main import main

Bench = Callable[..., dict[str, Any]]
PARAMETERS = 100_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """With tiny sizes and more arguments; returns its JSON."""

    def run(*arguments: str, folder: Path = tmp_path) -> dict[str, Any]:
        out = tmp_path / "optimizer.json"
        code = main(["optimizer", "--path", str(folder), "--parameters", str(PARAMETERS),
                     "--sub-group-size", "8192", "--block", "64K", "--steps", "2",
                     "--json", str(out), *arguments])
        assert code == 0
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    return run


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_step_is_measured_beside_its_floor(bench: Bench, dtype: str) -> None:
    figures = bench("--dtype", dtype)
    assert figures["sub_group_count"] == 13
    assert 0 < figures["update_s"] <= figures["step_s"]
    assert 0 <= figures["stall_s"] <= figures["step_s"]
    assert figures["floor_s"] == pytest.approx(max(
        figures["floor"]["update_s"],
        min(figures["floor"]["at_once_s"], figures["floor"]["in_turn_s"]),
    ), rel=0.5)  # medians of each
    assert figures["achieved_over_floor"] > 0
    assert figures["held_nbytes"] <= figures["peak_nbytes"]
    assert figures["settings"]["parameters"] == PARAMETERS


@pytest.mark.parametrize("optimizer,state_nbytes", [("adam", 8), ("sgd", 4), ("adagrad", 4)])
def test_other_optimizers_are_measured(bench: Bench, optimizer: str, state_nbytes: int) -> None:
    figures = bench("--dtype", "fp32", "--optimizer", optimizer)
    assert figures["write_nbytes"] == pytest.approx(state_nbytes * PARAMETERS, rel=0.05)
    assert figures["floor"]["update_s"] > 0


def test_bytes_are_those_of_the_state(bench: Bench) -> None:
    """fp32 parameters are their own masters: two moments of four bytes each."""
    figures = bench("--dtype", "fp32")
    assert figures["write_nbytes"] == pytest.approx(8 * PARAMETERS, rel=0.05)
    assert 0 < figures["read_nbytes"] < figures["write_nbytes"]  # some were left in memory
    assert 0 < figures["hit_count"] < 13


def test_memory_beyond_what_is_on_its_way_saves_reads(bench: Bench) -> None:
    small, large = bench("--memory-limit", "1M"), bench("--memory-limit", "64M")
    assert small["read_nbytes"] > large["read_nbytes"] == 0
    assert large["hit_count"] == 13
    assert large["achieved_over_floor"] > 0


def test_trace_and_picture_show_all_tracks(bench: Bench, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "steps.png"
    bench("--trace", str(trace), "--png", str(picture))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"read", "update", "write", "wait"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_is_not_a_drive(bench: Bench) -> None:
    assert bench(folder=Path("/dev/shm"))["labels"] == ["memory, not a device"]


def test_buffered_step_is_labelled_page_cache(bench: Bench) -> None:
    # field case L03
    assert "page cache" in bench("--direct", "off")["labels"]


def test_nothing_is_left_behind(bench: Bench, tmp_path: Path) -> None:
    bench()
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.json"]


@pytest.mark.parametrize("text,count", [
    ("4096", 4096), ("100M", 100_000_000), ("1.5B", 1_500_000_000), ("3e7", 30_000_000),
    ("1g", 1_000_000_000), ("10_000K", 10_000_000),
])
def test_elements_are_in_powers_of_1000(text: str, count: int) -> None:
    assert elements(text) == count


@pytest.mark.parametrize("arguments", [
    ["--parameters", "0"], ["--parameters", "many"], ["--parameters", "infM"],
    ["--optimizer", "rprop"], ["--dtype", "fp8"], ["--trace", "missing/trace.json"],
    ["--png", "missing/steps.png"],
])
def test_wrong_arguments_are_refused_before_anything_runs(
    tmp_path: Path, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["optimizer", "--path", str(tmp_path), *arguments])
    assert refused.value.code == 2
