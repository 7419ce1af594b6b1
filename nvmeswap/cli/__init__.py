"""What a person types: measure a drive, explain a machine, predict a run.

Not built yet. Here will stand `nvmeswap-bench`, `nvmeswap doctor` and `nvmeswap plan`: each parses
its arguments, calls the package's public functions and prints.
"""
