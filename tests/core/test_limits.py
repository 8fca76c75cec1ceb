"""Combination of limits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.limits import Limits

NAMES = [f.name for f in fields(Limits)]
bounds = st.none() | st.integers(0, 3)
any_limits = st.builds(
    Limits, **{name: bounds for name in NAMES if name != "seconds"}, seconds=bounds | st.floats(0, 3)
)


def test_nothing_is_bounded_unless_it_is_said() -> None:
    assert all(getattr(Limits(), name) is None for name in NAMES)


@given(any_limits, any_limits)
def test_of_two_the_lower_holds_limit_by_limit(a: Limits, b: Limits) -> None:
    lower = a.lower(b)
    for name in NAMES:
        set_ones = [x for x in (getattr(a, name), getattr(b, name)) if x is not None]
        assert getattr(lower, name) == min(set_ones, default=None)


@given(any_limits, any_limits, any_limits)
def test_neither_order_nor_grouping_nor_repetition_matters(a: Limits, b: Limits, c: Limits) -> None:
    assert a.lower(b) == b.lower(a)
    assert a.lower(b).lower(c) == a.lower(b.lower(c))
    assert a.lower(a) == a
    assert a.lower(b).lower(b) == a.lower(b)


@given(any_limits)
def test_no_limits_change_nothing(a: Limits) -> None:
    assert a.lower(Limits()) == Limits().lower(a) == a


@pytest.mark.parametrize("name", NAMES)
def test_zero_is_a_limit_and_the_lowest(name: str) -> None:
    zero = replace(Limits(), **{name: 0})
    assert replace(Limits(), **{name: 5}).lower(zero) == zero
    assert Limits().lower(zero) == zero
