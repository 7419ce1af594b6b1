"""What a person types: measure a drive, explain a machine, predict a run.

`bench/` is `nvmeswap-bench`. Not built yet: `nvmeswap doctor` and `nvmeswap plan`. Each parses its
arguments, calls the package's public functions and prints.
"""
