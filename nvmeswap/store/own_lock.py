"""A lock that only the process that made it can take."""

from __future__ import annotations

import os
import threading

from nvmeswap.io import native


class OwnLock:
    """Re-entrant, for `with`. In a forked child, which shares files with its parent but not what is
    known of them, it raises SwapForkError instead of waiting for a thread that isn't there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def is_own_process(self) -> bool:
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        if not self.is_own_process():
            raise native.fork_error()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
