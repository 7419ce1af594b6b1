"""`nvmeswap-bench tensors`: many small tensors by name, as `TensorSwapper` moves them."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from nvmeswap.cli.bench.device import device_of
from nvmeswap.cli.bench.effective import folder_facts
from nvmeswap.cli.bench.labels import labels
from nvmeswap.cli.bench.report import folder_rows, show_figures, show_labels, write_json
from nvmeswap.cli.bench.trial import Memory
from nvmeswap.cli.bench.usage import Stopwatch, Usage
from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.io.engine import DirectMode
from nvmeswap.io.probe import probe_folder
from nvmeswap.swap.tensors import TensorSwapper


def run(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Measure in `folder`, print, and write the JSON."""
    figures = measure(options, folder)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, {**figures, "settings": settings})
    rows = [
        (way, f"{figures[way]['tensors_per_s']:,.0f} tensors/s, "
              f"{figures[way]['us_per_tensor']:.2f} us each, "
              f"{figures[way]['cpu_s_per_gb']:.3f} s of processor per GB")
        for way in ("write", "read")
    ]
    title = (f"{options.count:_} tensors of {options.nbytes:_} bytes, {options.order}, "
             f"on {options.device}")
    show_labels(console, figures["labels"])
    show_figures(console, title, [*rows, *folder_rows(figures)])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rewrites and reads of tensors that are stored already; medians of the loops."""
    probe = probe_folder(
        folder, backend=options.backend, direct=DirectMode[options.direct.upper()]
    )
    swap = SwapBlock(backend=options.backend, direct=options.direct)
    aio = AioConfig(block_size=options.block, queue_depth=options.depth,
                    intra_op_parallelism=options.threads, use_gds=options.gds)
    nbytes = options.count * options.nbytes
    keys = [str(number) for number in range(options.count)]
    writes, reads = [], []
    with (
        _memory(nbytes, options.device) as source,
        _memory(nbytes, options.device) as destination,
        TensorSwapper(folder, swap=swap, aio=aio) as swapper,
    ):
        tensors = dict(zip(keys, source.split(options.nbytes), strict=True))
        outs = dict(zip(keys, destination.split(options.nbytes), strict=True))
        swapper.swap_out_many(tensors)
        if options.order == "random":
            random.shuffle(keys)
        for _ in range(options.loops):
            tensors = {key: tensors[key] for key in keys}
            watch = Stopwatch()
            swapper.swap_out_many(tensors)
            writes.append(watch.usage(nbytes))
            watch = Stopwatch()
            swapper.swap_in_many(keys, out=outs)
            if options.device == "cuda":
                torch.cuda.current_stream().synchronize()  # copies to it may be on their way
            reads.append(watch.usage(nbytes))
        assert torch.equal(source, destination)
        del tensors, outs
    device = device_of(folder)
    return {
        "write": _figures(writes, options.count),
        "read": _figures(reads, options.count),
        **folder_facts(probe, device),
        "labels": labels(
            buffered_nbytes=0 if probe.direct else nbytes,
            filesystem=probe.filesystem,
            device=device,
            one_way_gb_per_s=max(each.gb_per_s for each in (*writes, *reads)),
        ),
    }


@contextlib.contextmanager
def _memory(nbytes: int, device: str) -> Iterator[torch.Tensor]:
    """Random bytes in one piece, to be cut into tensors."""
    if device == "cuda":
        yield torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        return
    with Memory(nbytes, registered=True) as memory:
        yield memory.tensor


def _figures(usages: Sequence[Usage], count: int) -> dict[str, float]:
    wall_s = statistics.median(each.wall_s for each in usages)
    return {
        "tensors_per_s": count / wall_s,
        "us_per_tensor": wall_s / count * 1e6,
        "gb_per_s": statistics.median(each.gb_per_s for each in usages),
        "cpu_s_per_gb": statistics.median(each.cpu_s_per_gb for each in usages),
    }
