"""DeepSpeed's own tests of its engine pass on ours. Alone: suite.py beside this file."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from tests.peers.deepspeed_engine.suite import PASSED_ON_CPU, VERSION, bring_tests, run


@pytest.fixture
def tests_folder(tmp_path: Path) -> Path:
    """With DeepSpeed's tests, from the checkout that DEEPSPEED_CHECKOUT names, or from GitHub."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("DeepSpeed is not installed")
    if found != VERSION:
        pytest.skip(f"DeepSpeed {found} is installed, the tests are for {VERSION}")
    checkout = os.environ.get("DEEPSPEED_CHECKOUT")
    try:
        bring_tests(tmp_path, Path(checkout) if checkout else None)
    except OSError as error:
        pytest.skip(f"DeepSpeed's tests can't be had: {error}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_deepspeed_engine_tests_pass_on_our_engine(tests_folder: Path) -> None:
    outcomes = run(tests_folder)
    assert [name for name, outcome in outcomes.items() if outcome.failed] == []
    assert all(outcome.passed >= PASSED_ON_CPU[name] for name, outcome in outcomes.items())
