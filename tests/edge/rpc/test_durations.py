"""Conversion between seconds and durations."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.error import Busy
from rollout_server.core.limits import Limits
from rollout_server.edge.rpc.status import status_of
from rollout_server.edge.wire.spec import duration, limits_to_proto, seconds


@pytest.mark.parametrize(
    ("given_seconds", "whole", "nanos"),
    [
        (0.0, 0, 0),
        (2.3, 2, 300_000_000),
        (0.1 + 0.2, 0, 300_000_000),
        (1.1, 1, 100_000_000),
        (86_399.999, 86_399, 999_000_000),
        (0.999_999_999_9, 1, 0),
    ],
)
def test_seconds_are_rounded_to_the_nearest_nanosecond(given_seconds: float, whole: int, nanos: int) -> None:
    assert duration(given_seconds) == Duration(seconds=whole, nanos=nanos)


@given(nanos=st.integers(0, 10**15))
def test_what_a_duration_says_comes_back(nanos: int) -> None:
    exact = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
    assert duration(seconds(exact)) == exact


def test_limits_and_retries_say_the_seconds_that_were_set() -> None:
    expected = Duration(seconds=2, nanos=300_000_000)
    assert limits_to_proto(Limits(seconds=2.3)).time == expected
    info = RetryInfo()
    assert status_of(Busy("full", retry_after=2.3), "r1").details[-1].Unpack(info)
    assert info.retry_delay == expected
