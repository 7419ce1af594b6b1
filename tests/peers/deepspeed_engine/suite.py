"""DeepSpeed's own tests of its I/O engine, run against ours.

    python -m tests.peers.deepspeed_engine.suite [--checkout DIR]

What it needs: tests/peers/deepspeed_checkout.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.peers.deepspeed_checkout import bring_tests, parser, run_tests

FILES = ("unit/v1/nvme/test_aio.py", "unit/v1/nvme/test_pinned_manager.py")
# Those cases that need no GPU; with one there are 104.
PASSED_ON_CPU = {"test_aio": 52, "test_pinned_manager": 5}


def run(folder: Path) -> dict[str, Counter[str]]:
    """Runs the tests there; how many had which result, by test file."""
    outcomes: dict[str, Counter[str]] = {Path(name).stem: Counter() for name in FILES}
    for case in run_tests(folder, FILES, call="inject_engine").values():
        outcomes[Path(case.name.partition("::")[0]).stem][case.result] += 1
    return outcomes


def wrong(outcomes: dict[str, Counter[str]]) -> list[str]:
    """Test files with failures, or with too few that passed."""
    return [
        name for name, results in outcomes.items()
        if results.keys() - {"passed", "skipped"} or results["passed"] < PASSED_ON_CPU[name]
    ]


def main() -> int:
    """Prints the counts; the exit status is 1 when a case failed or too few were run."""
    checkout = parser(__doc__).parse_args().checkout
    with tempfile.TemporaryDirectory() as folder:
        bring_tests(Path(folder), checkout)
        outcomes = run(Path(folder))
    for name, results in outcomes.items():
        print(f"{name}: " + ", ".join(f"{count} {result}" for result, count in results.items()))
    return int(bool(wrong(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
