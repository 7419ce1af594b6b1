"""What holds for all tests."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the line that runs exactly the failed tests again, with the same random examples."""
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if not failed:
        return
    seed = terminalreporter.config.getoption("--hypothesis-seed", default=None)
    options = [] if seed is None else [f"--hypothesis-seed={seed}"]
    tests = sorted({report.nodeid for report in failed})
    terminalreporter.line("rerun: tools/test " + " ".join([*options, *tests]))
