"""Step `equality`: training from NVMe equals training in RAM on the GPU, bit for bit."""

from __future__ import annotations

import os
import socket
from functools import partial

import torch.distributed as dist
from gpu_programs import PROGRAMS, Runs, begin, difference
from gpu_told import Options, figure, note, options

from nvmeswap.config import SwapBlock


def main(given: Options) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    begin(given.device)
    updates_there = given.device == "cuda" and "update_device" in SwapBlock.model_fields
    if not updates_there:
        note("not compared with an update on the GPU: "
             f"{'no GPU' if given.rehearses else 'no update_device in this nvmeswap'}")
    for name, kind in PROGRAMS.items():
        runs = Runs(kind, given.device)
        folder = given.folder / name
        folder.mkdir()
        found = {name: difference(partial(runs.swapped, folder), runs.offloaded)}
        if updates_there:
            found[f"{name}_updated_on_gpu"] = difference(
                partial(runs.swapped, folder, update_device="cuda"), runs.resident)
        for each, differs in found.items():
            figure(f"equality_{each}", float(differs is None), target=1.0)
            if differs is not None:
                note(f"{each}: {differs}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(options(__doc__))
