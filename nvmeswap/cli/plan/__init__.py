"""`nvmeswap plan`: bytes a tier, seconds a phase, wear a day.

`models` makes a model without memory; `nvmeswap.zero3.foresight` sizes it; `rates` and `compute`
measure what this machine does, or take what was measured before; `passes` and `stepping` play a
step through with both; `predict` says what binds and what to change, `wear` what it does to the
drives; `report` shows it.
"""
