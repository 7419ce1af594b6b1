"""When a read or write of the store began and ended, over all transfers that it was cut into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nvmeswap.io.engine import Lane
from nvmeswap.store.manifest import TensorSpec

SIZE_NBYTES = 20 << 20  # several transfers of 8 MiB


def test_store_request_spans_all_its_transfers(tmp_path: Path, workshop: Any) -> None:
    store = workshop.store(tmp_path)
    store.create_file("a.swp", {"key": TensorSpec(torch.uint8, (SIZE_NBYTES,), (1,))})
    memory = torch.full((SIZE_NBYTES,), 7, dtype=torch.uint8)
    write = store.write("key", memory, lane=Lane.WRITEBACK)
    write.wait()
    read = store.read("key", memory, lane=Lane.DEMAND)
    read.wait()
    for request in (write, read):
        assert len(request.transfers) > 1
        for transfer in request.transfers:
            assert request.began_s <= transfer.began_s < transfer.ended_s <= request.ended_s
    assert write.ended_s <= read.began_s


def test_store_request_has_no_end_while_a_transfer_is_under_way(
    tmp_path: Path, workshop: Any
) -> None:
    store = workshop.store(tmp_path, fault_script="read 3 delay 100")
    store.create_file("a.swp", {"key": TensorSpec(torch.uint8, (SIZE_NBYTES,), (1,))})
    memory = torch.full((SIZE_NBYTES,), 7, dtype=torch.uint8)
    store.write("key", memory, lane=Lane.WRITEBACK).wait()
    read = store.read("key", memory, lane=Lane.DEMAND)
    assert read.ended_s is None
    read.wait()
    assert read.ended_s - read.began_s >= 0.1
