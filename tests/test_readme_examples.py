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


def examples_in(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [ROOT / "README.md", HOWTO / "optimizer.md", HOWTO / "zero3.md"]
EXAMPLES = [example for page in PAGES for example in examples_in(page)]


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


@pytest.mark.parametrize(
    ("page", "package"), [("huggingface", "peft"), ("accelerate", "accelerate")]
)
def test_page_about_other_packages_is_one_program_that_runs(
    page: str, package: str, tmp_path: Path
) -> None:
    """In this process: their imports take longer than all the rest.  field cases E07, F08, N04"""
    pytest.importorskip(package)
    program = "\n".join(examples_in(HOWTO / f"{page}.md"))
    exec(program.replace("/mnt/nvme", str(tmp_path)), {})
