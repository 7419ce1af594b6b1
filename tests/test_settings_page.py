"""The settings page is made from the code: a default that changed must change there too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_settings_page_equals_what_the_code_says() -> None:
    """Else a reader sets a value that means something else, or a key that is gone."""
    command = [sys.executable, str(ROOT / "tools" / "settings-page")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    committed = (ROOT / "docs" / "settings.md").read_text()
    assert committed == printed.stdout, "python tools/settings-page > docs/settings.md"
