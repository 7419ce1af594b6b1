"""The toy of module offload as a person types it, and the page about it.  field case A38"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nvmeswap.examples import offload_toy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "module_offload.md"
TINY = ["--size", "64", "--rows", "8", "--steps", "3", "--check"]


@pytest.mark.parametrize("on_nvme", [False, True])
def test_toy_equals_the_resident_run(
    on_nvme: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ["--path", str(tmp_path)] if on_nvme else []
    assert offload_toy.main([*TINY, *path]) == 0
    shown = capsys.readouterr().out
    assert "ms a step" in shown
    assert "peak RSS" in shown
    assert shown.splitlines()[-1] == "weights equal resident run: yes"
    assert list(tmp_path.rglob("*.swp")) == []


def test_toy_when_a_weight_differs_says_which_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that can't fail proves nothing: here the offloaded run starts from another weight."""

    class Tampered(offload_toy.Toy):
        built = 0

        def __init__(self, size: int) -> None:
            super().__init__(size)
            if not Tampered.built:
                with torch.no_grad():
                    self.layers[7].weight[5, 3] += 0.25
            Tampered.built += 1

    monkeypatch.setattr(offload_toy, "Toy", Tampered)
    assert offload_toy.main(TINY) == 1
    assert "no, layers." in capsys.readouterr().out.splitlines()[-1]


def test_page_about_it_is_one_program_that_runs(tmp_path: Path) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(program.replace("/mnt/nvme", str(tmp_path)), {})
