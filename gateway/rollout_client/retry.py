"""Retry policy: when to retry a call, and when to give up. No I/O: the clients sleep and call."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollout_client.errors import DeadlineExceeded, RolloutError

_LOG = logging.getLogger("rollout_client")
# Upper bound in seconds for a pause that a server requests. Threads cannot sleep for arbitrarily long.
_LONGEST_PAUSE: Final = 86_400
# In seconds. gRPC cannot encode a deadline that is centuries away, so longer timeouts are sent as no timeout.
_LONGEST_TIMEOUT: Final = 1e9


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy: exponential backoff with jitter. All values are in seconds.

    Every call is idempotent and can be retried; `start` and `run` carry a request id for this purpose.

    Args:
        patience: give up after this time without a success; may be infinite. 0: never retry.
        first: backoff after the first failure. It doubles with each further failure. A random part of up to half is subtracted.
        longest: upper bound of the backoff. A longer pause that the server requests is honoured.

    Raises ValueError for a negative value, or for `first` or `longest` above 86,400 s.
    """

    patience: float = 60.0
    first: float = 0.1
    longest: float = 5.0

    def __post_init__(self) -> None:
        for name in ("patience", "first", "longest"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{name} must be a number of seconds, 0 or more")
        if max(self.first, self.longest) > _LONGEST_PAUSE:
            raise ValueError(f"first and longest must be at most {_LONGEST_PAUSE} s")


DEFAULT_RETRY: Final = Retry()


class Attempts:
    """Retry state of one call or stream.

    Args:
        retry: the policy.
        timeout: seconds for all attempts together; infinite: no limit.
        clock: returns monotonic seconds.
        chance: returns a random number from 0 to 1, for the jitter.
    """

    def __init__(
        self,
        retry: Retry,
        timeout: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._chance = chance
        self._deadline = clock() + timeout
        self._failures = 0
        self._failing_since = 0.0
        self._connected_since: float | None = None
        self._last: RolloutError | None = None

    @property
    def left(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return max(0.0, self._deadline - self._clock())

    @property
    def timeout(self) -> float | None:
        """Timeout of the next attempt in seconds, as gRPC takes it: None means no limit."""
        return self.left if self.left < _LONGEST_TIMEOUT else None

    def on_connect(self) -> None:
        """Note that a stream was established. If it stays open for `longest` seconds, it counts as progress."""
        self._connected_since = self._clock()

    def on_progress(self) -> None:
        """Note that something was received, so the next failure is the first of a new series."""
        self._failures, self._last = 0, None

    def on_failure(self, failure: RolloutError) -> float:
        """Return the seconds to pause before the next attempt. Raises the failure if there is to be none.

        If the timeout expires during a retry, the failure of the previous attempt is raised: it names the cause.
        """
        now = self._clock()
        if self._connected_since is not None and now - self._connected_since >= self._retry.longest:
            self.on_progress()
        self._connected_since = None
        if isinstance(failure, DeadlineExceeded) and self._last is not None:
            raise self._last
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        failure.attempts, self._last = self._failures, failure
        pause = self._pause(failure)
        given_up = now + pause - self._failing_since >= self._retry.patience or now + pause >= self._deadline
        if not failure.retryable or given_up:
            raise failure
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        _LOG.log(level, "call failed, retrying in %.2g s: %s", pause, failure)
        return pause

    def _pause(self, failure: RolloutError) -> float:
        # The exponent is bounded: 2.0 ** 1024 raises OverflowError.
        longest = min(self._retry.longest, self._retry.first * 2.0 ** min(self._failures - 1, 60))
        if failure.retry_after is not None:
            # Never earlier than the server requested; the jitter spreads clients that were refused together.
            return min(failure.retry_after + self._chance() * longest, _LONGEST_PAUSE)
        return (0.5 + 0.5 * self._chance()) * longest
