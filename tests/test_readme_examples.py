"""The README's examples are run as they stand there: the first code a newcomer copies must work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOWTO = ROOT / "docs" / "howto"
PAGES = [ROOT / "README.md", HOWTO / "optimizer.md", HOWTO / "zero3.md"]
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example_runs(example: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", example.replace("/mnt/nvme", str(tmp_path))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
