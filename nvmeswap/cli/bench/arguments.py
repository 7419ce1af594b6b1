"""What can be asked of `nvmeswap-bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

_T = TypeVar("_T")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_BACKENDS = ["auto", "uring", "aio", "posix"]
_BLOCK_MULTIPLE_NBYTES = 4096
# As the JSON's `aio` takes them.
_MOST_BLOCK_NBYTES, _MOST_DEPTH, _MOST_THREADS = 1 << 30, 4096, 64


def size(text: str) -> int:
    """"512K" and the like, in powers of 1024, as bytes."""
    plain = text.upper().removesuffix("IB").removesuffix("B")
    unit = plain[-1:] if plain[-1:] in "KMGT" else ""
    number = plain.removesuffix(unit).replace("_", "")
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 512K, 1M or 2G")
    return int(number) * _UNITS[unit]


def elements(text: str) -> int:
    """"100M" and the like, in powers of 1000, as models are named."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)].replace("_", "")
    try:
        count = int(float(number) * _THOUSANDS[unit])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write 4096, 100M, 1.5B or 3e7")
    return count


def block(text: str) -> int:
    nbytes = size(text)
    if nbytes % _BLOCK_MULTIPLE_NBYTES or nbytes > _MOST_BLOCK_NBYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4096 up to 1G")
    return nbytes


def count_up_to(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        number = text.replace("_", "")
        if not number.isdigit() or not 1 <= int(number) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {most}")
        return int(number)

    return count


def backend(text: str) -> str:
    if text not in _BACKENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_BACKENDS)}")
    return text


def list_of(each: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Several, separated by commas, each once."""

    def several(text: str) -> list[_T]:
        return list(dict.fromkeys(each(part) for part in text.split(",")))

    return several


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line (`sys.argv` by default). Exits with a sentence if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="nvmeswap-bench",
        description="What a drive does under nvmeswap. Needs no root, works in a folder of its own "
        "below --path and removes it.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_io(commands.add_parser("io", help="one setting: speed, processor time, latency"))
    _add_sweep(commands.add_parser("sweep", help="many settings; ends with an aio block"))
    _add_tensors(commands.add_parser("tensors", help="many small tensors, by name"))
    _add_optimizer(commands.add_parser("optimizer", help="a step with its state on the drive"))
    options = parser.parse_args(arguments)
    problem = _conflict(options)
    if problem is not None:
        parser.error(problem)
    return options


def _add_common(
    parser: argparse.ArgumentParser, *, size_default: str | None, loops: str = "--loops"
) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--path", type=Path, required=True, metavar="DIR",
                        help="an existing folder on the drive")
    if size_default is not None:
        parser.add_argument("--size", type=size, default=size_default, help="of the trial file")
        parser.add_argument("--memory", choices=["registered", "plain"], default="registered",
                            help="2 MiB pages pinned once, or an ordinary tensor")
    parser.add_argument("--threads", type=count_up_to(_MOST_THREADS), default=2,
                        help="of the posix backend")
    parser.add_argument("--direct", choices=["prefer", "require", "off"], default="prefer",
                        help="bypass the page cache")
    parser.add_argument(loops, type=count_up_to(1000), default=3, help="the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")


def _add_one_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block", type=block, default="1M", help="bytes of one transfer")
    parser.add_argument("--depth", type=count_up_to(_MOST_DEPTH), default=32,
                        help="blocks in flight")
    parser.add_argument("--backend", type=backend, default="auto", help=", ".join(_BACKENDS))


def _add_io(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, size_default="1G")
    _add_one_setting(parser)
    parser.add_argument("--mode", choices=["read", "write", "mixed"], default="read",
                        help="mixed reads and writes as much, at a time")
    parser.add_argument("--pattern", choices=["sequential", "random"], default="sequential",
                        help="order of the blocks")
    _add_device(parser)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, size_default="1G")
    parser.add_argument("--blocks", type=list_of(block), default="256K,512K,1M,2M",
                        help="bytes of one transfer")
    parser.add_argument("--depths", type=list_of(count_up_to(_MOST_DEPTH)), default="8,16,32,64",
                        help="blocks in flight")
    parser.add_argument("--backends", type=list_of(backend), default="auto",
                        help="of " + ", ".join(_BACKENDS))
    parser.add_argument("--search", choices=["grid", "coordinate"], default="grid",
                        help="all of them, or one axis at a time")
    parser.add_argument("--png", type=Path, metavar="FILE", default=Path("nvmeswap-bench.png"),
                        help="heat maps; takes matplotlib")
    parser.add_argument("--no-png", action="store_true", help="draw none")


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, size_default=None)
    _add_one_setting(parser)
    parser.add_argument("--count", type=count_up_to(10_000_000), default=4096, help="tensors")
    parser.add_argument("--nbytes", type=size, default="64K", help="of each")
    parser.add_argument("--order", choices=["random", "stored"], default="random",
                        help="in which they are asked for")
    _add_device(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="whose memory is moved")
    parser.add_argument("--gds", action="store_true",
                        help="by GPUDirect Storage, where it can be had")


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, size_default=None, loops="--steps")
    _add_one_setting(parser)
    parser.add_argument("--parameters", type=elements, default="100M", help="elements in all")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16",
                        help="of parameters and gradients; bf16 has a master on the drive, too")
    parser.add_argument("--optimizer", choices=["adamw", "adam", "sgd", "adagrad"],
                        default="adamw", help="of torch.optim; sgd has momentum")
    parser.add_argument("--sub-group-size", type=elements, default=None,
                        help="elements read, updated and written together; from the memory limit")
    parser.add_argument("--buffers", type=count_up_to(1 << 20), default=3,
                        help="sub-groups in memory")
    parser.add_argument("--memory-limit", type=size, default=None,
                        help="of swap memory; what it has room for stays cached")
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="write a trace of some steps, for ui.perfetto.dev")
    parser.add_argument("--png", type=Path, metavar="FILE",
                        help="draw these steps; takes matplotlib")


def _conflict(options: argparse.Namespace) -> str | None:
    """The first thing asked for that can't be had, in a sentence; None if all is well."""
    drawn = None if getattr(options, "no_png", False) else getattr(options, "png", None)
    for path in (options.json, drawn, getattr(options, "trace", None)):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{path} can't be written: its folder is missing"
    if getattr(options, "device", None) == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch finds no GPU"
    if getattr(options, "gds", False) and options.backend != "auto":
        return "--gds is a backend of its own: leave out --backend"
    if options.command in ("tensors", "optimizer"):
        return None
    if options.command == "io" and options.gds != (options.device == "cuda"):
        return "--device cuda and --gds go together (`tensors --device cuda` goes through the host)"
    if options.command == "io" and options.gds and options.memory == "plain":
        return "--gds: an engine moves registered memory of a GPU only"
    largest = max(options.blocks) if options.command == "sweep" else options.block
    least = 2 if options.command == "io" and options.mode == "mixed" else 1
    if options.size < least * largest:
        return f"--size {options.size} is less than {least} x {largest}, the size of a block"
    return None
