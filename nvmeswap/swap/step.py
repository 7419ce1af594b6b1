"""What is remembered between the beginning of an optimizer's step and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.sub_group import StateItem


@dataclass(eq=False, slots=True)
class Step:
    """A step under way. It is made whole and then set in one assignment, so that whatever
    interrupts a step, Ctrl-C included, the next call of `step` finds either none or one to go on
    with.

    `before`: the scalars (step count and the like) of each parameter that may be updated, None for
    one that never was; `after`: those of the ones that have been. `edits`: values that others wrote
    to it since the last step, or None. `options`: the group of each. `expected`: those whose
    gradient is there, and must not be lost before it is used. `remaining`: the sub-groups not yet
    updated. `walked`: all are, but with several ranks another one may not have got so far.
    """

    before: dict[str, Mapping[str, Any] | None]
    edits: dict[str, torch.Tensor | None]
    options: dict[str, dict[str, Any]]
    expected: set[str]
    remaining: list[int]
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    walked: bool = False


def options_now(
    groups: Iterable[Mapping[str, Any]], key_of: Callable[[torch.Tensor], str]
) -> dict[str, dict[str, Any]]:
    """The options of each parameter's group, copied: load_state_dict replaces groups, users and
    schedulers change them, and all of a step goes by the same."""
    options = {}
    for group in groups:
        copied = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        options.update({key_of(parameter): copied for parameter in group["params"]})
    return options


def check_options(
    rule: ElementwiseOptimizer,
    item_of: Callable[[str], StateItem | None],
    before: Mapping[str, Mapping[str, Any] | None],
    options: Mapping[str, dict[str, Any]],
) -> None:
    """Options that need other states than there are must not be found in mid-update. Raises
    SwapUsageError."""
    checked = set()
    for key, scalars in before.items():
        item, group, is_first = item_of(key), options[key], scalars is None
        if item is not None and (id(group), item.states, is_first) not in checked:
            rule.check(item.states, group, is_first=is_first)
            checked.add((id(group), item.states, is_first))
