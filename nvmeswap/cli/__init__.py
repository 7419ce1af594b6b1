"""What a person types: measure a drive, explain a machine, predict a run.

`bench/` is `nvmeswap-bench`; `main` is `nvmeswap`, whose subcommands are `plan/` and `doctor/`.
Each parses its arguments, calls the package's public functions and prints.
"""
