"""Finished rollouts that are remembered for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rollout_server.runtime.ports import Clock
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity


class Retention:
    """Those that have finished and owe nobody their outcome, in the order in which that came to be."""

    def __init__(self, capacity: Capacity, clock: Clock) -> None:
        self._capacity = capacity
        self._clock = clock
        self._rollouts: deque[tuple[Rollout, float]] = deque()
        self._bytes = 0

    def add(self, rollout: Rollout) -> None:
        """Remembers one more."""
        self._rollouts.append((rollout, self._clock.monotonic()))
        self._bytes += rollout.machine.size

    def surplus(self) -> Iterator[str]:
        """Lets go of those that are too old, too many or too large together, the oldest first. Yields their uids."""
        now, capacity = self._clock.monotonic(), self._capacity
        while self._rollouts:
            rollout, since = self._rollouts[0]
            young = now - since < capacity.finished_seconds
            if young and len(self._rollouts) <= capacity.finished and self._bytes <= capacity.finished_bytes:
                return
            self._rollouts.popleft()
            self._bytes -= rollout.machine.size
            yield rollout.uid
