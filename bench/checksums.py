"""What comparing every read with what was written costs, on one large tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from report import Report, Samples

from nvmeswap.cli.bench.trial import Memory
from nvmeswap.cli.bench.usage import Stopwatch
from nvmeswap.config import SwapBlock
from nvmeswap.swap.tensors import TensorSwapper


def measure_checksums(report: Report, folder: Path, nbytes: int) -> None:
    """`checksum_read_cost` and `checksum_write_cost`: the time that checksums add, as a share."""
    with (
        Memory(nbytes, registered=True) as source,
        Memory(nbytes, registered=True) as destination,
        TensorSwapper(folder, swap=SwapBlock(checksum="all")) as with_sums,
        TensorSwapper(folder, swap=SwapBlock(checksum="off")) as without_sums,
    ):

        def both(swapper: TensorSwapper) -> Callable[[], Samples]:
            def run() -> Samples:
                watch = Stopwatch()
                swapper.swap_out("tensor", source.tensor)
                write = watch.usage(nbytes)
                watch = Stopwatch()
                swapper.swap_in("tensor", out=destination.tensor)
                return {"write": write, "read": watch.usage(nbytes)}

            return run

        found = report.rounds("checksums", {"all": both(with_sums), "off": both(without_sums)})
    for way in ("read", "write"):
        report.figure(f"checksum_{way}_cost", 1 / found.ratio("all", "off", way) - 1)
