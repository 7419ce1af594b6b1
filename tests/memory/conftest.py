"""A child process for tests that change limits or rights of the process they run in."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest


def _run_in_child(body: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            result = {"value": body()}
        except BaseException:
            result = {"failure": traceback.format_exc()}
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    result = json.loads(answer)  # empty: the child was killed
    assert "failure" not in result, result["failure"]
    return result["value"]


@pytest.fixture
def in_child() -> Callable[[Callable[[], Any]], Any]:
    """Calls a function in a forked child; returns its result, which must fit in JSON."""
    return _run_in_child
