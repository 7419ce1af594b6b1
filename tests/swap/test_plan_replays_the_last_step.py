"""The plan knows what comes next, and a wrong plan is harmless."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.swap.plan import Plan

KEYS = st.text("abcde", min_size=1, max_size=1)


def replayed(order: list[str]) -> Plan:
    plan = Plan()
    for key in order:
        plan.use(key)
    plan.end_step()
    return plan


@given(st.lists(KEYS, min_size=1, max_size=30))
def test_plan_when_the_step_repeats_names_each_next_use(order: list[str]) -> None:
    """Else reads run ahead for the wrong shards and every use waits for the disk."""
    plan = replayed(order)
    for place, key in enumerate(order):
        assert next(plan.upcoming()) == key
        assert plan.next_use(key) == 0
        plan.use(key)
        rest = order[place + 1 :] + order[: place + 1]
        assert list(plan.upcoming()) == rest
        for other in set(order):
            assert plan.next_use(other) == rest.index(other)


@given(st.lists(KEYS, max_size=20), st.lists(KEYS, max_size=20), st.lists(KEYS, max_size=20))
def test_plan_when_the_step_differs_learns_the_new_order(
    first: list[str], second: list[str], third: list[str]
) -> None:
    """Else a changed order (MoE, eval between steps) would never be read ahead again.
    field case N02"""
    plan = replayed(first)
    for key in second:
        plan.use(key)
    plan.end_step()
    last = second or first
    assert list(plan.upcoming()) == last
    for key in third:
        plan.use(key)
        assert len(list(plan.upcoming())) == len(last)


def test_plan_when_an_unplanned_key_is_used_keeps_its_place() -> None:
    """Else one evaluation in between makes the rest of the step unpredicted."""
    plan = replayed(["a", "b", "c"])
    plan.use("a")
    plan.use("unknown")
    assert list(islice(plan.upcoming(), 2)) == ["b", "c"]
    assert plan.next_use("unknown") > plan.next_use("a")


def test_plan_when_passes_come_without_steps_begins_again() -> None:
    """Inference, or more micro-batches than in the last step."""
    plan = replayed(["a", "b", "c"])
    for _ in range(3):
        for place, key in enumerate("abc"):
            plan.use(key)
            assert list(plan.rest()) == ["a", "b", "c"][place + 1 :]


def test_plan_before_the_first_step_knows_nothing() -> None:
    """A first step must not fail for lack of a plan."""
    plan = Plan()
    plan.use("a")
    assert list(plan.upcoming()) == []
    assert plan.next_use("a") == 0
