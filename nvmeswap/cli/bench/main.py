"""The console script `nvmeswap-bench`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from nvmeswap.cli.bench import io_trial, optimizer_trial, sweep_trial, tensor_trial
from nvmeswap.cli.bench.arguments import parse
from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.errors import SwapError
from nvmeswap.io.filesystem import BufferedFallbackWarning, FilesystemWarning

_TRIALS = {
    "io": io_trial.run, "sweep": sweep_trial.run, "tensors": tensor_trial.run,
    "optimizer": optimizer_trial.run,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 after an error of ours (told on stderr), 2 for a wrong command line, 130
    after Ctrl-C."""
    options = parse(arguments)
    for category in (BufferedFallbackWarning, FilesystemWarning):
        warnings.simplefilter("ignore", category)  # the labels say it
    try:
        with own_folder(options.path) as folder:
            _TRIALS[options.command](options, folder, Console())
    except SwapError as error:  # says what to do; a traceback would only hide it
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
