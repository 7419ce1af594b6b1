"""`nvmeswap doctor`: what this machine and a folder can do, each with what mends it.

`finding` is one line of the report; `folder`, `kernel`, `memory` and `software` make them.
"""
