"""Requests that are sent until they are answered. Pure: the clients send them and sleep in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode
from osmosis.rollout.v1.rollout_service_pb2 import (
    ROLLOUT_STATE_FINISHED,
    Rollout,
    WaitRolloutRequest,
    WaitRolloutResponse,
)

from rollout_client.errors import DeadlineExceeded, NotFinished, RolloutError, Unavailable
from rollout_client.proto_fields import duration
from rollout_client.retry import Attempts, Retry

_LONGEST_POLL: Final = 30.0
_SHORTEST_POLL: Final = 1.0
_SLACK: Final = 5.0
_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)


class Exchange(Generic[_Q, _A]):
    """One request and its response."""

    def __init__(self, request: _Q, attempts: Attempts) -> None:
        self._request = request
        self._attempts = attempts

    def request(self) -> _Q:
        """What the next attempt sends."""
        return self._request

    def timeout(self) -> float | None:
        """Seconds that the next attempt has."""
        return self._attempts.timeout

    def is_complete(self, response: _A) -> bool:
        """Whether this was the last response, or another request is to be sent."""
        return True

    def on_failure(self, failure: RolloutError) -> float:
        """Seconds to pause after a failure; raises it where it is final."""
        return self._attempts.on_failure(failure)


class LongPoll(Exchange[WaitRolloutRequest, WaitRolloutResponse]):
    """A wait for a rollout's end, by one long poll after another.

    A poll is shorter than what proxies let a call take, and after a failure the polls begin short again: each that is
    answered shows that the server is there.
    """

    def __init__(
        self,
        request: WaitRolloutRequest,
        timeout: float,
        retry: Retry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(request, Attempts(retry, clock=clock))
        self._clock = clock
        self._deadline = clock() + timeout
        self._timeout = timeout
        self._longest = _LONGEST_POLL
        self._poll = 0.0
        self._rollout: Rollout | None = None

    def request(self) -> WaitRolloutRequest:
        """A poll."""
        self._poll = min(self._longest, self._left())
        self._request.timeout.CopyFrom(duration(self._poll, "timeout"))
        return self._request

    def timeout(self) -> float:
        """The poll's time, and some more for the answer's way."""
        return self._poll + _SLACK

    def is_complete(self, response: WaitRolloutResponse) -> bool:
        """Whether the rollout has finished. Raises `NotFinished` once the time is over."""
        self._attempts.on_progress()
        self._longest = min(2 * self._longest, _LONGEST_POLL)
        self._rollout = response.rollout
        if response.rollout.state == ROLLOUT_STATE_FINISHED:
            return True
        if self._left() <= 0:
            raise self._not_finished()
        return False

    def on_failure(self, failure: RolloutError) -> float:
        """As for any request, but a poll that gets no answer in its own time is a server that cannot be reached."""
        self._longest = _SHORTEST_POLL
        if isinstance(failure, DeadlineExceeded):
            code, request_id = StatusCode.UNAVAILABLE, failure.request_id
            failure = Unavailable(code, f"no answer within {self.timeout():g} s", request_id=request_id)
        if failure.retryable and self._left() <= 0:
            raise self._not_finished(failure)
        return min(self._attempts.on_failure(failure), self._left())

    def _left(self) -> float:
        return max(0.0, self._deadline - self._clock())

    def _not_finished(self, failure: RolloutError | None = None) -> NotFinished:
        text = f"the rollout {self._request.uid!r} has not finished after {self._timeout:g} s"
        if failure is not None:
            text += f"; the server was last asked in vain: {failure}"
        error = NotFinished(StatusCode.DEADLINE_EXCEEDED, text)
        error.rollout = self._rollout
        return error
