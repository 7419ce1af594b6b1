"""DeepSpeed's asynchronous handle, a file a tensor, as its swappers use it. Runs in an interpreter
of its own, reads a request a line (JSON) and answers a line.

    {"nbytes": 4096, "count": 8192, "folder": "..."}    prepares
    {"way": "write"} or {"way": "read"}                 measures
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from answers import answer_requests, cpu_s

BLOCK_NBYTES = 1 << 20
QUEUE_DEPTH = 32


class Handle:
    """Page-locked tensors side by side, and DeepSpeed's handle over a file for each."""

    def __init__(self, library: Any, torch: Any, *, folder: str, nbytes: int, count: int) -> None:
        self.handle = library.aio_handle(BLOCK_NBYTES, QUEUE_DEPTH, False, True, 1)
        self.memory = self.handle.new_cpu_locked_tensor(
            nbytes * count, torch.empty(0, dtype=torch.uint8)
        )
        self.memory.random_()
        self.tensors = [self.memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        self.paths = [os.path.join(folder, f"{index}.swp") for index in range(count)]

    def move(self, way: str) -> tuple[float, float]:
        start = self.handle.async_pwrite if way == "write" else self.handle.async_pread
        begin_cpu_s, begin_s = cpu_s(), time.perf_counter()
        for tensor, path in zip(self.tensors, self.paths, strict=True):
            start(tensor, path, 0)
        assert self.handle.wait() == len(self.paths)
        return time.perf_counter() - begin_s, cpu_s() - begin_cpu_s


def begin() -> Callable[..., dict[str, Any]]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load(verbose=False)
    handle: Handle | None = None

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal handle
        if "way" not in request:
            handle = Handle(library, torch, **request)
            return {}
        assert handle is not None
        wall_s, used_s = handle.move(request["way"])
        return {"wall_s": wall_s, "cpu_s": used_s}

    return answer


if __name__ == "__main__":
    answer_requests(begin)
