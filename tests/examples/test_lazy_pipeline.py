"""The example runs, and its images are those of plain modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvmeswap.examples import lazy_pipeline


@pytest.mark.parametrize("on_nvme", [False, True])
def test_example_prints_equal(
    on_nvme: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu"] + (["--nvme-path", str(tmp_path)] if on_nvme else [])
    assert lazy_pipeline.main(arguments) == 0
    assert capsys.readouterr().out.strip().endswith("images equal")
