"""Other people's tests, fetched for the time of a test."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from tests.peers.deepspeed_checkout import VERSION, bring_tests


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
