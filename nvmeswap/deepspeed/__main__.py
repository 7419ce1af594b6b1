"""python -m nvmeswap.deepspeed [-m] SCRIPT [ARGUMENTS]: run a DeepSpeed script on our swappers.

With DeepSpeed's launcher: `deepspeed --module nvmeswap.deepspeed SCRIPT [ARGUMENTS]`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from nvmeswap.deepspeed import install


def main() -> None:
    """Installs, and becomes the script. Launchers put `--local_rank=N` first: it is passed on."""
    arguments = sys.argv[1:]
    launchers = [each for each in arguments[:1] if each.startswith("--local_rank")]
    arguments = arguments[len(launchers) :]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments:
        sys.exit(__doc__)
    script = arguments[0]
    install()
    sys.argv = [script, *launchers, *arguments[1:]]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
