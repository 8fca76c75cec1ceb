"""Unary calls with retries, and long polling. No I/O: the clients send the requests and sleep in between."""

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
    """One unary call: the same request until it succeeds or the failure is final."""

    def __init__(self, request: _Q, attempts: Attempts) -> None:
        self._request = request
        self._attempts = attempts

    def request(self) -> _Q:
        """Return the request of the next attempt."""
        return self._request

    def timeout(self) -> float | None:
        """Return the timeout of the next attempt in seconds; None: no limit."""
        return self._attempts.timeout

    def is_complete(self, response: _A) -> bool:
        """Return True if this response is the result, False to send another request."""
        return True

    def on_failure(self, failure: RolloutError) -> float:
        """Return the seconds to pause after a failure. Raises the failure if it is final."""
        return self._attempts.on_failure(failure)


class LongPoll(Exchange[WaitRolloutRequest, WaitRolloutResponse]):
    """Wait for a rollout's end by consecutive long polls.

    A poll lasts at most 30 s, less than the usual call timeout of a proxy. After a failure it lasts 1 s and doubles with each
    response, because only a response shows that the server is reachable.
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
        """Return the next poll. Its timeout is the time the server waits before it responds."""
        self._poll = min(self._longest, self._left())
        self._request.timeout.CopyFrom(duration(self._poll, "timeout"))
        return self._request

    def timeout(self) -> float:
        """Return the deadline of the poll in seconds: its own time, plus slack for the network."""
        return self._poll + _SLACK

    def is_complete(self, response: WaitRolloutResponse) -> bool:
        """Return True if the rollout has finished. Raises `NotFinished` once the timeout has expired."""
        self._attempts.on_progress()
        self._longest = min(2 * self._longest, _LONGEST_POLL)
        self._rollout = response.rollout
        if response.rollout.state == ROLLOUT_STATE_FINISHED:
            return True
        if self._left() <= 0:
            raise self._not_finished()
        return False

    def on_failure(self, failure: RolloutError) -> float:
        """Return the seconds to pause. A poll without a response counts as an unreachable server, so it is retried."""
        self._longest = _SHORTEST_POLL
        if isinstance(failure, DeadlineExceeded):
            code, request_id = StatusCode.UNAVAILABLE, failure.request_id
            failure = Unavailable(
                code, f"the server sent no response within {self.timeout():g} s", request_id=request_id
            )
        if failure.retryable and self._left() <= 0:
            raise self._not_finished(failure)
        return min(self._attempts.on_failure(failure), self._left())

    def _left(self) -> float:
        return max(0.0, self._deadline - self._clock())

    def _not_finished(self, failure: RolloutError | None = None) -> NotFinished:
        text = f"the rollout {self._request.uid!r} has not finished after {self._timeout:g} s"
        if failure is not None:
            text += f"; the last request failed: {failure}"
        error = NotFinished(StatusCode.DEADLINE_EXCEEDED, text)
        error.rollout = self._rollout
        return error
