"""What can be asked of `nvmeswap plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from nvmeswap.cli.bench.arguments import count_up_to, size


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments, in the order in which they are explained."""
    model = parser.add_argument_group("the model, one of").add_mutually_exclusive_group(
        required=True
    )
    model.add_argument("--transformers", type=Path, metavar="PATH",
                       help="folder with a transformers config.json, or that file")
    model.add_argument("--shapes", type=Path, metavar="FILE",
                       help='{"name": {"shape": [8, 4], "dtype": "bf16", "trained": true}, ...}')
    model.add_argument("--safetensors", type=Path, metavar="PATH",
                       help="a file or a folder of them; only headers are read")
    model.add_argument("--factory", metavar="MODULE:FUNCTION",
                       help="called without arguments on the meta device; returns the model")

    run = parser.add_argument_group("the run")
    run.add_argument("--config", type=Path, required=True, metavar="FILE",
                     help="the JSON that shard() gets")
    run.add_argument("--ranks", type=count_up_to(1 << 20), default=1, help="in all")
    run.add_argument("--ranks-per-node", type=count_up_to(1 << 10), default=None,
                     help="that share a node's drives; 8 at most, unless told")
    run.add_argument("--micro-batches", type=count_up_to(1 << 16), default=1,
                     help="forward and backward passes a step")
    run.add_argument("--device", choices=["cpu", "cuda"], default="cuda",
                     help="that computes: gradients from a GPU have memory of their own")
    run.add_argument("--host-memory", type=size, metavar="SIZE",
                     help="of a rank's swap memory, as nvmeswap.host_memory_nbytes")
    run.add_argument("--device-memory", type=size, metavar="SIZE", help="of a rank's GPU")

    drives = parser.add_argument_group("the drives of a node, one of (or the JSON's nvme_path)")
    drives.add_argument("--path", type=Path, action="append", metavar="DIR",
                        help="measured now; again for each drive")
    drives.add_argument("--bench", type=Path, nargs="+", metavar="FILE",
                        help="JSON of nvmeswap-bench io or optimizer, or of an earlier plan")
    drives.add_argument("--read-gbps", type=positive, metavar="GB/S", help="with --write-gbps")
    drives.add_argument("--write-gbps", type=positive, metavar="GB/S")
    drives.add_argument("--size", type=size, default="512M", help="of the file to measure with")

    compute = parser.add_argument_group("computing, of one micro-batch (without it: the drive's)")
    compute.add_argument("--compute-forward-s", type=positive, metavar="S",
                         help="measured in memory with FSDP2; with --compute-backward-s")
    compute.add_argument("--compute-backward-s", type=positive, metavar="S")
    compute.add_argument("--batch", metavar="MODULE:FUNCTION",
                         help="with --factory: a batch, to time some of the blocks with, now")

    wear = parser.add_argument_group("wear, of one drive")
    wear.add_argument("--rated-tbw", type=positive, metavar="TB", help="terabytes written")
    wear.add_argument("--dwpd", type=positive, metavar="N", help="writes a day, with --capacity")
    wear.add_argument("--capacity", type=size, metavar="SIZE")
    wear.add_argument("--warranty-years", type=positive, default=5.0, help="that --dwpd holds for")

    parser.add_argument("--json", metavar="FILE", help="write it here, too; - for only there")


def conflict(options: argparse.Namespace) -> str | None:
    """The first thing that makes no sense, in a sentence; None if all is well."""
    pairs = (("read_gbps", "write_gbps"), ("compute_forward_s", "compute_backward_s"),
             ("dwpd", "capacity"))
    for one, other in pairs:
        if (getattr(options, one) is None) != (getattr(options, other) is None):
            return f"--{one.replace('_', '-')} and --{other.replace('_', '-')} go together"
    given = [options.path is not None, options.bench is not None, options.read_gbps is not None]
    if sum(given) > 1:
        return "--path, --bench and --read-gbps exclude each other"
    if options.batch is not None and options.factory is None:
        return "--batch needs --factory"
    if options.batch is not None and options.compute_forward_s is not None:
        return "--batch and --compute-forward-s exclude each other"
    if options.rated_tbw is not None and options.dwpd is not None:
        return "--rated-tbw and --dwpd exclude each other"
    if options.ranks_per_node is not None and options.ranks_per_node > options.ranks:
        return "--ranks-per-node is more than --ranks"
    return None
