"""DeepSpeed's own tests of NVMe offload, as DeepSpeed is and with our swappers installed.

    python -m tests.peers.deepspeed_swap.suite [--checkout DIR] [--only NAME ...]

What it needs: tests/peers/deepspeed_checkout.py. Prints both results of each test, then what those
said that pass without us alone; there the exit status is 1.

test_nvme_checkpointing wants fp16, which few CPUs have. Copies of it, made at run time, train in
bf16 and in fp32: `test_nvme_checkpointing_bf16`, `test_nvme_checkpointing_fp32`. Two lines of
the harness are changed too, in the temporary copy: as they are, comparing fails on a CPU.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.peers.deepspeed_checkout import Case, bring_tests, parser, run_tests

_CHECKPOINTING = "unit/runtime/zero/test_nvme_checkpointing"
# Of the many cases of a file, those that swap.
SELECTIONS = {
    f"{_CHECKPOINTING}.py": "",
    f"{_CHECKPOINTING}_bf16.py": "",
    f"{_CHECKPOINTING}_fp32.py": "",
    "unit/runtime/zero/test_zero_tensor_fragment.py": "nvme and -3-",
    "unit/v1/zero/test_zero_user_backward.py": "nvme",
    "unit/v1/compile/test_compile_zero.py": "nvme and -3-",
    "unit/inference/quantization/test_intX_quantization.py": "nvme",
}
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Pair:
    """One test's two results; of one that only one side reached, the other is "not run"."""

    name: str
    stock: Case
    ours: Case

    @property
    def worse(self) -> bool:
        return self.stock.result == "passed" and self.ours.result != "passed"


def prepare(tests: Path) -> None:
    """Writes the copies of test_nvme_checkpointing, and lets the harness compare on the CPU.
    Raises ValueError when DeepSpeed's files aren't as known."""
    source = tests / f"{_CHECKPOINTING}.py"
    for name, dtype, setting in (
        ("bf16", "torch.bfloat16", '"bf16": {"enabled": True},'), ("fp32", "torch.float32", "")
    ):
        _rewrite(source, tests / f"{_CHECKPOINTING}_{name}.py", {
            r"get_accelerator\(\).is_fp16_supported\(\)": "True",
            r'"fp16": \{[^}]*\},': setting,
            r"torch\.float16": dtype,
        })
    harness = tests / "unit/common.py"
    _rewrite(harness, harness, {  # else a tensor on the device "0", and one that gloo can't gather
        r"device = get_accelerator\(\)\.current_device\(\)":
            "device = get_accelerator().current_device_name()",
        r"torch\.tensor\(1 if flag else 0,": "torch.tensor([1 if flag else 0],",
    })


def _rewrite(source: Path, target: Path, changes: dict[str, str]) -> None:
    text = source.read_text()
    for pattern, new in changes.items():
        text, count = re.subn(pattern, new, text)
        if count == 0:
            raise ValueError(f"{source.name} has no {pattern}")
    target.write_text(text)


def compare(folder: Path, only: list[str]) -> list[Pair]:
    """Runs both sides, file after file; `only`: files whose names have one of these in them."""
    prepare(folder / "tests")
    pairs: list[Pair] = []
    for file, expression in SELECTIONS.items():
        if only and not any(part in file for part in only):
            continue
        stock = run_tests(folder, [file], call=None, expression=expression)
        ours = run_tests(
            folder, [file], call="install", expression=expression, process_count=2
        )
        pairs.extend(_paired(stock, ours))
    return pairs


def _paired(stock: dict[str, Case], ours: dict[str, Case]) -> list[Pair]:
    return [
        Pair(name, *(side.get(name, Case(name, _NOT_RUN)) for side in (stock, ours)))
        for name in {**stock, **ours}
    ]


def tell(pairs: list[Pair]) -> None:
    """A line a test, then why."""
    names = [pair.name.rpartition("/")[2].replace(".py::", "::") for pair in pairs]
    width = max(map(len, names), default=0)
    print(f"\n{'test':{width}}  stock    ours")
    for name, pair in zip(names, pairs, strict=True):
        print(f"{name:{width}}  {pair.stock.result:7}  {pair.ours.result}")
    for reason in sorted({pair.stock.text for pair in pairs if pair.stock.result == "skipped"}):
        print(f"skipped: {reason}")
    for name, pair in zip(names, pairs, strict=True):
        if pair.stock.result in ("failed", "hung"):
            print(f"\nstock, {name}: {_traceback(pair.stock)[-1]}")
    for name, pair in zip(names, pairs, strict=True):
        if pair.worse:
            print(f"\nours, {name}:", *_traceback(pair.ours), sep="\n")


def _traceback(case: Case) -> list[str]:
    """Lines of the rank's, without pytest's of the process that waited for it."""
    return case.text.partition('"""\n\nThe above exception')[0].rstrip().split("\n")


def main() -> int:
    """The exit status is 1 when a test passes without us alone, or none passed."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", default=[], metavar="NAME",
                           help="test files with one of these in their names")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bring_tests(Path(folder), options.checkout)
        pairs = compare(Path(folder), options.only)
    tell(pairs)
    passed = any(pair.stock.result == "passed" for pair in pairs)
    return int(not passed or any(pair.worse for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
