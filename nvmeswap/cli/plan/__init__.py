"""`nvmeswap plan`: bytes a tier, seconds a phase, wear a day.

`models` makes a model without memory; `nvmeswap.zero3.foresight` sizes it; `rates` and `compute`
measure what this machine does, or take what was measured before; `phases` and `stepping` predict
from both; `advice` says what binds and what to change; `report` shows it.
"""
