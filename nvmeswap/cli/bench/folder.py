"""A folder of our own to measure in, gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from nvmeswap.config import check_folders


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed with all in it on the way out, also by Ctrl-C and SIGTERM.

    Raises SwapPathError when `parent` can't be written. For the main thread only.
    """
    check_folders(parent, key="--path")
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with tempfile.TemporaryDirectory(prefix="nvmeswap-bench-", dir=parent) as name:
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
