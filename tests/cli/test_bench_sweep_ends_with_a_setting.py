"""A sweep ends with an `aio` block that can be pasted, and a picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvmeswap.cli.bench.main import main
from nvmeswap.cli.bench.measuring import Setting
from nvmeswap.cli.bench.sweep import Axes, Speeds, Sweep
from nvmeswap.config import Config

ROOT = Path(__file__).resolve().parents[2]
TWO_BY_TWO = ["--size", "2M", "--loops", "1", "--blocks", "64K,128K", "--depths", "2,4"]


def last_object(text: str) -> dict[str, Any]:
    """The JSON object that a program's output ends with."""
    found: dict[str, Any] = json.loads(text[text.rindex("\n{\n") :])
    return found


@pytest.mark.parametrize("search", ["grid", "coordinate"])
@pytest.mark.filterwarnings("ignore:without effect")
def test_sweep_of_two_by_two_emits_a_config_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], search: str
) -> None:
    # field case L04
    out = tmp_path / "sweep.json"
    code = main(["sweep", "--path", str(tmp_path), *TWO_BY_TWO, "--search", search, "--no-png",
                 "--json", str(out)])
    assert code == 0
    emitted = last_object(capsys.readouterr().out)
    aio = emitted["aio"]
    config = Config.load({"zero_optimization": {"stage": 3}, **emitted})
    assert config.aio.block_size == aio["block_size"] in (64 << 10, 128 << 10)
    assert config.aio.queue_depth == aio["queue_depth"] in (2, 4)
    # DeepSpeed's own keys and types; it takes no strings for numbers.
    assert {key: type(value) for key, value in aio.items()} == {
        "block_size": int,
        "queue_depth": int,
        "intra_op_parallelism": int,
        "single_submit": bool,
        "overlap_events": bool,
    }
    written = json.loads(out.read_text())
    assert written["aio"] == aio
    tried = {(each["block_nbytes"], each["queue_depth"]) for each in written["settings_tried"]}
    assert len(tried) == 4 if search == "grid" else 3 <= len(tried) <= 4
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_sweep_draws_heat_maps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.png"
    code = main(["sweep", "--path", str(tmp_path), *TWO_BY_TWO, "--backends", "auto,posix",
                 "--search", "coordinate", "--png", str(picture)])
    assert code == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.png"]


def test_sweep_without_matplotlib_tells_how_to_get_it(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from nvmeswap.cli.bench.main import main; sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "sweep", "--path", str(tmp_path), *TWO_BY_TWO],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=120,
    )
    assert result.returncode == 1
    assert "pip install 'nvmeswap[bench]'" in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def hill(setting: Setting) -> Speeds:
    """Fastest at 4 x 16."""
    distance = abs(setting.block_nbytes.bit_length() - 3) + abs(setting.queue_depth - 16)
    return Speeds(10 / (1 + distance), 20 / (1 + distance))


@pytest.mark.parametrize("search", ["search_grid", "search_coordinate"])
def test_search_finds_the_top_of_a_hill(search: str) -> None:
    tried: list[Setting] = []

    def measure(setting: Setting) -> Speeds:
        tried.append(setting)
        return hill(setting)

    axes = Axes(["aio"], [1, 2, 4, 8], [4, 8, 16, 32], thread_count=2)
    sweep = Sweep(measure, loops=3)
    getattr(sweep, search)(axes)
    assert sweep.best() == Setting("aio", 4, 16, 2)
    assert len(tried) == 3 * len(set(tried))
    assert (len(set(tried)) == 16) == (search == "search_grid")


def test_best_of_equals_is_the_one_with_least_in_flight() -> None:
    sweep = Sweep(lambda setting: Speeds(3.0, 3.0 + setting.queue_depth / 1000), loops=1)
    sweep.search_grid(Axes(["aio"], [1, 2], [16, 32], thread_count=2))
    assert sweep.best() == Setting("aio", 1, 16, 2)


def test_one_fast_sample_does_not_win() -> None:
    samples = {4: [3.0, 3.0, 3.0], 8: [1.0, 9.0, 1.0]}

    def measure(setting: Setting) -> Speeds:
        speed = samples[setting.queue_depth].pop()
        return Speeds(speed, speed)

    sweep = Sweep(measure, loops=3)
    sweep.search_grid(Axes(["aio"], [1], [4, 8], thread_count=2))
    assert sweep.best().queue_depth == 4
