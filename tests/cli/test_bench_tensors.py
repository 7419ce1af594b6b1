"""`nvmeswap-bench tensors`: figures for each way, with what they are worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nvmeswap.cli.bench.main import main


@pytest.mark.parametrize("order", ["random", "stored"])
@pytest.mark.parametrize("nbytes", ["4096", "1001"])
@pytest.mark.parametrize("on_tmpfs", [False, True])
def test_tensors_are_measured_each_way(
    tmp_path: Path, order: str, nbytes: str, on_tmpfs: bool
) -> None:
    folder = Path("/dev/shm") if on_tmpfs else tmp_path
    out = tmp_path / "tensors.json"
    code = main(["tensors", "--path", str(folder), "--count", "50", "--nbytes", nbytes, "--order",
                 order, "--loops", "2", "--json", str(out)])
    assert code == 0
    figures = json.loads(out.read_text())
    for way in ("write", "read"):
        assert figures[way]["tensors_per_s"] * figures[way]["us_per_tensor"] == pytest.approx(1e6)
        assert figures[way]["cpu_s_per_gb"] > 0
    assert ("memory, not a device" in figures["labels"]) == on_tmpfs
    assert figures["settings"]["count"] == 50


def test_buffered_tensors_are_labelled_page_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # field case L03
    assert main(["tensors", "--path", str(tmp_path), "--count", "4", "--direct", "off"]) == 0
    assert "page cache" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tensors_on_a_gpu_are_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["tensors", "--path", str(tmp_path), "--count", "4", "--device", "cuda"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may be had here")
def test_gds_that_can_not_be_had_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="use_gds"):
        assert main(["tensors", "--path", str(tmp_path), "--count", "4", "--gds"]) == 0
