"""A pytest plugin: a line of JSON a case, written as it begins and as it ends.

pytest's own reports are written at the end of a run, which a hanging case doesn't let it reach.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def _write(name: str, result: str, text: str = "") -> None:
    with Path(os.environ["NVMESWAP_PEER_REPORT"]).open("a") as report:
        report.write(json.dumps({"name": name, "result": result, "text": text}) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "hung")  # until it says otherwise


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        assert isinstance(report.longrepr, tuple)
        _write(report.nodeid, "skipped", report.longrepr[2])
    elif report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.when == "call":
        _write(report.nodeid, "passed")
