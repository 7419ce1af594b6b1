"""DeepSpeed's own tests of its engine pass on ours. Alone: suite.py beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.deepspeed_engine.suite import run, wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_deepspeed_engine_tests_pass_on_our_engine(tests_folder: Path) -> None:
    assert wrong(run(tests_folder)) == []
