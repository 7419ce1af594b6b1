"""Where `--json` goes: a file, or stdout for `-`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvmeswap.errors import SwapConfigError


def write(where: str | None, content: Mapping[str, Any]) -> None:
    """Raises SwapConfigError where the file can't be written."""
    if where is None:
        return
    text = json.dumps(content, indent=2, default=str) + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text)
    except OSError as error:
        raise SwapConfigError(
            f"{where} can't be written", key="--json", path=where, errno=error.errno,
            fix="name a file in an existing folder, or - for stdout",
        ) from None
