"""The example and the page about it run; its images are those of plain modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvmeswap.examples import lazy_pipeline

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "lazy.md"


@pytest.mark.parametrize("on_nvme", [False, True])
def test_example_prints_equal(
    on_nvme: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu"] + (["--nvme-path", str(tmp_path)] if on_nvme else [])
    assert lazy_pipeline.main(arguments) == 0
    assert capsys.readouterr().out.strip().endswith("images equal")


def test_code_on_the_page_runs(tmp_path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(example.replace("/mnt/nvme", str(tmp_path)), {})
