"""DeepSpeed's own tests of NVMe offload pass with our swappers where they pass without. Alone:
suite.py beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.deepspeed_swap.suite import compare


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_deepspeed_swap_tests_pass_with_our_swappers(tests_folder: Path) -> None:
    pairs = compare(tests_folder, only=[])
    assert [pair.name for pair in pairs if pair.worse] == []
    assert any(pair.stock.result == "passed" for pair in pairs)
