"""When a transfer began and ended is known afterwards, whoever waited for it and how late."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from nvmeswap.io.engine import Engine


def _file(folder: Path, nbytes: int) -> Path:
    path = folder / "bytes"
    path.write_bytes(bytes(nbytes))
    return path


def test_request_ends_when_its_bytes_are_moved_not_when_it_is_waited_for(tmp_path: Path) -> None:
    with Engine(backend="posix") as engine:
        file = engine.open(_file(tmp_path, 1 << 20))
        buffer = torch.full((1 << 20,), 7, dtype=torch.uint8)
        before_s = time.perf_counter()
        request = engine.read(file, 0, buffer)
        submitted_s = time.perf_counter()
        while not request.done():
            time.sleep(0.001)
        over_s = time.perf_counter()
        time.sleep(0.05)
        request.wait()
        assert request.ended_s is not None
        assert before_s <= request.began_s <= submitted_s
        assert request.began_s < request.ended_s <= over_s
        file.close()


def test_request_has_no_end_while_it_is_under_way(tmp_path: Path) -> None:
    with Engine(backend="fault", fault_script="any * delay 200") as engine:
        file = engine.open(_file(tmp_path, 4096))
        request = engine.read(file, 0, torch.full((4096,), 7, dtype=torch.uint8))
        assert request.ended_s is None
        request.wait()
        assert request.ended_s is not None
        assert request.ended_s - request.began_s >= 0.2
        file.close()


def test_request_for_nothing_takes_no_time(tmp_path: Path) -> None:
    with Engine(backend="posix") as engine:
        file = engine.open(_file(tmp_path, 4096))
        request = engine.read(file, 0, torch.empty(0, dtype=torch.uint8))
        assert request.ended_s is not None and math.isclose(request.ended_s, request.began_s)
        file.close()
