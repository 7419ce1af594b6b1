"""The console script `nvmeswap`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from nvmeswap.cli.doctor import main as doctor
from nvmeswap.cli.plan import arguments as plan_arguments
from nvmeswap.cli.plan import main as plan
from nvmeswap.errors import SwapError
from nvmeswap.io.filesystem import BufferedFallbackWarning, FilesystemWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 after an error of ours (told on stderr), a plan that does not fit or a
    check that failed; 2 for a wrong command line; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="nvmeswap", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    planned = commands.add_parser("plan", help="bytes a tier, seconds a phase, wear a day",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    plan_arguments.add(planned)
    checked = commands.add_parser("doctor", help="what this machine can do, and what to mend")
    doctor.add_arguments(checked)
    options = parser.parse_args(arguments)
    if options.command == "plan" and (problem := plan_arguments.conflict(options)) is not None:
        planned.error(problem)
    for category in (BufferedFallbackWarning, FilesystemWarning):
        warnings.simplefilter("ignore", category)  # the report says it
    try:
        return plan.run(options) if options.command == "plan" else doctor.run(options)
    except SwapError as error:  # says what to do; a traceback would only hide it
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
