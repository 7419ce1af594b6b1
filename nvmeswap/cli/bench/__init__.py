"""`nvmeswap-bench`: what a drive does under this engine, and what such a figure is worth.

`trial` and `measuring` move the bytes, `labels` and `device` say what a figure is not, `sweep`
looks for the best setting, `report` and `plot` show it. A module `..._trial` is a subcommand.
"""
