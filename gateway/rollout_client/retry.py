"""When to try again, and when to give up. Pure: the clients sleep and call."""

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
# Longer ones, which a server may ask for, are more than threads can sleep.
_LONGEST_PAUSE: Final = 86_400
# A deadline in centuries is more than gRPC can send.
_LONGEST_TIMEOUT: Final = 1e9


@dataclass(frozen=True, slots=True)
class Retry:
    """How a server that fails is tried again. All in seconds.

    Every call is safe to repeat: the contract lets anybody retry them, `start` and `run` thanks to their request id.

    Args:
        patience: for how long in a row the server may fail, also infinite; 0: every failure is raised at once.
        first: the pause after the first failure. It doubles with each one, and a part of it is left to chance.
        longest: the longest pause of our own. A server that asks for a longer one gets it.
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
    """The attempts of one call or stream.

    Args:
        retry: the rules.
        timeout: seconds for everything together, infinite for no limit.
        clock: monotonic seconds.
        chance: a number from 0 to 1 for the jitter.
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
        """The same for gRPC, where None is no limit."""
        return self.left if self.left < _LONGEST_TIMEOUT else None

    def on_connect(self) -> None:
        """A stream came about. It is progress if it holds."""
        self._connected_since = self._clock()

    def on_progress(self) -> None:
        """Something arrived, so the next failure is the first in a row."""
        self._failures, self._last = 0, None

    def on_failure(self, failure: RolloutError) -> float:
        """Seconds to pause before the next attempt. Raises the failure where there is to be none.

        Where a call's time ends while the server fails, the server's failure is raised: it says more.
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
        _LOG.log(level, "trying again in %.2g s: %s", pause, failure)
        return pause

    def _pause(self, failure: RolloutError) -> float:
        # The exponent is bounded because a float is not.
        longest = min(self._retry.longest, self._retry.first * 2.0 ** min(self._failures - 1, 60))
        if failure.retry_after is not None:
            return min(failure.retry_after + self._chance() * longest, _LONGEST_PAUSE)
        return (0.5 + 0.5 * self._chance()) * longest
