"""A lock that only the process that made it can take."""

from __future__ import annotations

import os
import threading

from nvmeswap.io import native


class OwnLock:
    """Re-entrant; `with lock():` holds it. In a forked child, which shares files with its parent
    but not what is known of them, it raises SwapForkError instead of waiting for a thread that
    isn't there.

    Held by `threading.RLock` itself: were entering or leaving it Python code, Ctrl-C could come in
    the middle of it, and other threads would wait for ever.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def is_own_process(self) -> bool:
        return os.getpid() == self._pid

    def __call__(self) -> threading.RLock:
        if not self.is_own_process():
            raise native.fork_error()
        return self._lock
