"""Retry conditions, deadlines and final errors, on a manual clock."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from grpc import StatusCode
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import Busy, DeadlineExceeded, InvalidRequest, NotFinished, Retry, RolloutError, Unavailable
from rollout_client.requests import long_poll
from rollout_client.retry import Attempts
from rollout_client.unary_retry import LongPoll


@dataclass
class Clock:
    """A clock that advances only on request."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def cut() -> Unavailable:
    return Unavailable(StatusCode.UNAVAILABLE, "Socket closed")


def busy(retry_after: float | None) -> Busy:
    return Busy(StatusCode.RESOURCE_EXHAUSTED, "full", reason="TOO_MANY_ROLLOUTS", retry_after=retry_after)


def pauses(attempts: Attempts, clock: Clock) -> Iterator[float]:
    """The pauses between immediate, consecutive failures, until the client gives up."""
    while True:
        try:
            pause = attempts.on_failure(cut())
        except Unavailable:
            return
        yield pause
        clock.now += pause


def test_pauses_double_up_to_the_longest(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=100, first=1, longest=8), clock=clock, chance=lambda: 1.0)
    assert list(pauses(attempts, clock))[:6] == [1, 2, 4, 8, 8, 8]


def test_a_part_of_each_pause_is_left_to_chance(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=100, first=1, longest=8), clock=clock, chance=lambda: 0.0)
    assert list(pauses(attempts, clock))[:4] == [0.5, 1, 2, 4]


def test_patience_ends(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=10, first=1, longest=4), clock=clock, chance=lambda: 1.0)
    assert sum(pauses(attempts, clock)) == 7  # 1 + 2 + 4; the next pause of 4 would exceed the limit


def test_years_of_failures_are_no_overflow(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=math.inf, first=1, longest=2), clock=clock)
    assert all(0 < attempts.on_failure(cut()) <= 2 for _ in range(2000))


@pytest.mark.parametrize("patience", [0, 0.0])
def test_no_patience_is_no_second_attempt(clock: Clock, patience: float) -> None:
    with pytest.raises(Unavailable) as caught:
        Attempts(Retry(patience=patience, first=0), clock=clock).on_failure(cut())
    assert caught.value.attempts == 1


def test_a_server_that_names_a_time_is_left_alone_for_that_long(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=100, first=1, longest=8), clock=clock, chance=lambda: 0.5)
    assert attempts.on_failure(busy(30)) == 30.5
    with pytest.raises(Busy):
        Attempts(Retry(patience=20), clock=clock).on_failure(busy(30))


@pytest.mark.parametrize(
    "final",
    [
        busy(None),
        InvalidRequest(StatusCode.INVALID_ARGUMENT, "no", reason="INVALID_REQUEST"),
        RolloutError(StatusCode.INTERNAL, "ours", reason="INTERNAL"),
        RolloutError(StatusCode.UNIMPLEMENTED, "what?"),
        RolloutError(StatusCode.ABORTED, "cancelled on the server"),
    ],
)
def test_what_waiting_does_not_help_is_raised_at_once(clock: Clock, final: RolloutError) -> None:
    with pytest.raises(type(final)):
        Attempts(Retry(), clock=clock).on_failure(final)
    assert not final.retryable


@pytest.mark.parametrize(
    "code", [StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED]
)
def test_what_breaks_on_the_way_is_tried_again(clock: Clock, code: StatusCode) -> None:
    assert Attempts(Retry(), clock=clock).on_failure(Unavailable(code, "RST_STREAM")) > 0


def test_the_time_of_a_call_holds_for_all_attempts(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=100, first=1, longest=4), 5, clock=clock, chance=lambda: 1.0)
    assert attempts.left == 5
    assert list(pauses(attempts, clock)) == [1, 2]
    assert attempts.left == 2


def test_a_deadline_after_failures_raises_the_failure(clock: Clock) -> None:
    attempts = Attempts(Retry(), 5, clock=clock)
    attempts.on_failure(cut())
    with pytest.raises(Unavailable):
        attempts.on_failure(DeadlineExceeded(StatusCode.DEADLINE_EXCEEDED, "late"))
    attempts.on_progress()
    with pytest.raises(DeadlineExceeded):
        attempts.on_failure(DeadlineExceeded(StatusCode.DEADLINE_EXCEEDED, "late"))


@pytest.mark.parametrize("held", [0.0, 3.9])
def test_a_stream_that_breaks_at_once_is_no_progress(clock: Clock, held: float) -> None:
    attempts = Attempts(Retry(patience=10, first=1, longest=4), clock=clock, chance=lambda: 1.0)
    attempts.on_failure(cut())
    clock.now += 9
    attempts.on_connect()
    clock.now += held
    with pytest.raises(Unavailable):
        attempts.on_failure(cut())


def test_a_stream_that_held_is_progress_and_so_is_an_event(clock: Clock) -> None:
    attempts = Attempts(Retry(patience=10, first=1, longest=4), clock=clock, chance=lambda: 1.0)
    attempts.on_failure(cut())
    clock.now += 9
    attempts.on_connect()
    clock.now += 4
    assert attempts.on_failure(cut()) == 1
    clock.now += 9
    attempts.on_progress()
    assert attempts.on_failure(cut()) == 1


def test_the_first_failure_in_a_row_is_logged_as_a_warning(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rollout_client")
    attempts = Attempts(Retry(), clock=clock)
    for _ in range(3):
        attempts.on_failure(cut())
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
    assert "Socket closed" in caplog.records[0].message


@pytest.mark.parametrize(
    "wrong", [{"patience": -1}, {"first": math.nan}, {"longest": "1"}, {"patience": True}, {"longest": math.inf}]
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retry(**wrong)


def test_times_beyond_what_clocks_can_count_are_no_limit(clock: Clock) -> None:
    assert Attempts(Retry(), math.inf, clock=clock).timeout is None
    assert Attempts(Retry(), 1e300, clock=clock).timeout is None
    assert Attempts(Retry(), 1e6, clock=clock).timeout == 1e6
    assert Attempts(Retry(patience=math.inf), clock=clock).on_failure(busy(1e11)) == 86_400


def wait_for(timeout: float, clock: Clock) -> LongPoll:
    return LongPoll(pb.WaitRolloutRequest(uid="u"), timeout, Retry(patience=60, first=1, longest=4), clock=clock)


def answered(waited: LongPoll, clock: Clock, state: pb.RolloutState.ValueType) -> bool:
    """The server responds at the end of a poll."""
    clock.now += seconds(waited)
    return waited.is_complete(pb.WaitRolloutResponse(rollout=pb.Rollout(state=state)))


def seconds(waited: LongPoll) -> float:
    return waited.request().timeout.ToTimedelta().total_seconds()


def test_polls_are_short_of_what_a_wait_may_take(clock: Clock) -> None:
    waited = wait_for(50, clock)
    assert seconds(waited) == 30
    assert waited.timeout() == 35
    assert not answered(waited, clock, pb.ROLLOUT_STATE_RUNNING)
    assert seconds(waited) == 20
    with pytest.raises(NotFinished) as caught:
        answered(waited, clock, pb.ROLLOUT_STATE_RUNNING)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rollout is not None
    assert caught.value.rollout.state == pb.ROLLOUT_STATE_RUNNING


def test_a_wait_of_no_time_looks_once(clock: Clock) -> None:
    waited = wait_for(0, clock)
    assert seconds(waited) == 0
    assert waited.timeout() > 0
    assert waited.is_complete(pb.WaitRolloutResponse(rollout=pb.Rollout(state=pb.ROLLOUT_STATE_FINISHED)))
    with pytest.raises(NotFinished):
        waited.is_complete(pb.WaitRolloutResponse(rollout=pb.Rollout(state=pb.ROLLOUT_STATE_QUEUED)))


def test_after_a_failure_polls_begin_short_and_each_answer_is_progress(clock: Clock) -> None:
    """A proxy that limits calls to 15 s does not end a wait."""
    waited = wait_for(math.inf, clock)
    asked = []
    for _ in range(40):
        asked.append(seconds(waited))
        clock.now += min(asked[-1], 15)
        if asked[-1] > 15:
            clock.now += waited.on_failure(cut())
        else:
            waited.is_complete(pb.WaitRolloutResponse(rollout=pb.Rollout(state=pb.ROLLOUT_STATE_RUNNING)))
    assert asked[:7] == [30, 1, 2, 4, 8, 16, 1]


def test_a_poll_without_an_answer_is_a_server_that_is_not_there(clock: Clock) -> None:
    waited = wait_for(math.inf, clock)

    def ask_in_vain() -> None:
        for _ in range(20):
            seconds(waited)
            clock.now += waited.timeout()
            clock.now += waited.on_failure(DeadlineExceeded(StatusCode.DEADLINE_EXCEEDED, "late"))

    with pytest.raises(Unavailable, match="no response within"):
        ask_in_vain()


def test_a_wait_whose_time_ends_while_the_server_is_away_is_over(clock: Clock) -> None:
    waited = wait_for(3, clock)

    def ask_in_vain() -> None:
        for _ in range(20):
            seconds(waited)
            clock.now += waited.on_failure(cut())

    with pytest.raises(NotFinished, match="Socket closed") as caught:
        ask_in_vain()
    assert caught.value.rollout is None


def test_a_wait_ends_with_what_is_final(clock: Clock) -> None:
    with pytest.raises(InvalidRequest):
        wait_for(3, clock).on_failure(InvalidRequest(StatusCode.INVALID_ARGUMENT, "no", reason="INVALID_REQUEST"))


@pytest.mark.parametrize(
    ("timeout", "error"), [(-1, ValueError), (math.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_times_that_make_no_sense_are_refused(timeout: float, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout"):
        long_poll("u", "basic", timeout, Retry())


def test_not_finished_travels_with_its_rollout() -> None:
    error = NotFinished(StatusCode.DEADLINE_EXCEEDED, "late")
    error.rollout = pb.Rollout(uid="u", state=pb.ROLLOUT_STATE_RUNNING)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.rollout, str(again)) == (NotFinished, error.rollout, str(error))
