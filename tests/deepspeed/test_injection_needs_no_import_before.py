"""DeepSpeed is imported when its engine is to be replaced, and at no other time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvmeswap.deepspeed import inject_engine
from nvmeswap.errors import SwapConfigError


def test_missing_deepspeed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SwapConfigError) as raised:
        inject_engine()
    assert raised.value.fix is not None and "DeepSpeed" in raised.value.fix


def test_deepspeed_gets_our_engine_from_its_own_builders() -> None:
    """In a process of its own: what is injected stays. Prints nothing of DeepSpeed's import."""
    script = """
import sys
from nvmeswap.deepspeed import aio_handle, inject_engine, pin_handle
assert "deepspeed" not in sys.modules
inject_engine()
inject_engine()
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
assert AsyncIOBuilder().load().aio_handle is aio_handle
assert PinMemoryBuilder().load().pin_handle is pin_handle
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
