"""Waiting and running rollouts: checks capacity and chooses which rollout runs next."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_server.core.error import Busy
from rollout_server.runtime.ports import Clock
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity

_MIB = 2**20


@dataclass(slots=True)
class _CallerUsage:
    """Resources that one caller uses.

    `line` is a heap that may still hold withdrawn rollouts. `starts` are the starts left in the caller's token bucket at the
    time `at` (monotonic seconds).
    """

    starts: float
    at: float
    line: list[tuple[int, int, str]] = field(default_factory=list)
    queued: int = 0
    running: int = 0
    parked: int = 0
    bytes: int = 0


class RolloutQueue:
    """Rollouts by caller, within the limits of a `Capacity`. A rollout's bytes count until `forget`."""

    def __init__(self, capacity: Capacity, clock: Clock) -> None:
        self._capacity = capacity
        self._quota = capacity.quota()
        self._clock = clock
        self._uses: dict[str, _CallerUsage] = {}
        self._waiting: dict[str, Rollout] = {}
        self._parked: set[str] = set()
        self._sizes: dict[str, int] = {}
        self.running = 0
        self.bytes = 0

    def __len__(self) -> int:
        """Return how many rollouts wait for a slot, of all callers. Running ones are counted in `running`."""
        return len(self._waiting)

    def check(self, caller: str, sizes: Sequence[int]) -> None:
        """Raise `Busy` if capacity or the caller's quota has no room for rollouts of these sizes (bytes)."""
        capacity, count, size = self._capacity, len(sizes), sum(sizes)
        waiting = len(self) + len(self._parked)
        room = capacity.total - self.running - waiting
        if count > room:
            more = f": there is no room for {count} more" if count > 1 else ""
            raise Busy(f"{self.running} rollouts run and {waiting} wait{more}; ask again later", retry_after=1.0)
        # A rollout that is larger than the whole limit is admitted when it is the only one: waiting would never help it.
        if (self.bytes or count > 1) and self.bytes + size > capacity.active_bytes:
            most = capacity.active_bytes // _MIB
            text = f"rollouts hold {self.bytes // _MIB} MiB, at most {most} MiB are allowed; ask again later"
            raise Busy(text, retry_after=1.0, reason="TOO_MANY_BYTES")
        self._check_quota(self._use(caller), count, size)

    def put(self, rollout: Rollout, number: int) -> None:
        """Add a waiting rollout. `number` increases with every rollout."""
        use = self._use(rollout.caller)
        heapq.heappush(use.line, (-rollout.spec.priority, number, rollout.uid))
        use.queued += 1
        use.starts -= not rollout.is_restored  # it was charged for when it was accepted
        self._waiting[rollout.uid] = rollout

    def next(self) -> Rollout | None:
        """Return the rollout to run next and count it as running; None if none may run.

        The caller with the fewest running rollouts goes first; among its rollouts, priority and then age decide.
        """
        most = self._quota.running
        ready = [use for use in self._uses.values() if use.queued and (most is None or use.running < most)]
        if not ready or self.running >= self._capacity.running:
            return None
        for use in ready:
            # Skip withdrawn ones; `use.queued` > 0, so a waiting one follows.
            while use.line[0][2] not in self._waiting:
                heapq.heappop(use.line)
        use = min(ready, key=lambda use: (use.running, use.line[0]))
        use.queued -= 1
        use.running += 1
        self.running += 1
        return self._waiting.pop(heapq.heappop(use.line)[2])

    def withdraw(self, rollout: Rollout) -> bool:
        """Remove a waiting rollout. Return False if it was not waiting."""
        if self._waiting.pop(rollout.uid, None) is None:
            return False
        use = self._use(rollout.caller)
        use.queued -= 1
        # `next` drops withdrawn rollouts only while it looks for one to run. Without a free slot they would pile up.
        if len(use.line) > 2 * use.queued:
            use.line = [each for each in use.line if each[2] in self._waiting]
            heapq.heapify(use.line)
        return True

    def leave(self, rollout: Rollout) -> None:
        """Count a rollout as not running any more."""
        self._use(rollout.caller).running -= 1
        self.running -= 1

    def park(self, rollout: Rollout) -> None:
        """Count a rollout that waits for its group towards the capacity. It needs no slot any more."""
        self._parked.add(rollout.uid)
        self._use(rollout.caller).parked += 1

    def unpark(self, rollout: Rollout) -> None:
        """Count a rollout as not waiting for its group any more."""
        self._parked.remove(rollout.uid)
        self._use(rollout.caller).parked -= 1

    def measure(self, rollout: Rollout) -> None:
        """Update the size of a rollout whose conversation has grown."""
        self._resize(rollout, rollout.size)

    def forget(self, rollout: Rollout) -> None:
        """Stop counting a rollout's bytes: the retention of finished rollouts counts them from here on."""
        self._resize(rollout, 0)
        del self._sizes[rollout.uid]

    def _resize(self, rollout: Rollout, size: int) -> None:
        more = size - self._sizes.get(rollout.uid, 0)
        self._sizes[rollout.uid] = size
        if more:
            self._use(rollout.caller).bytes += more
            self.bytes += more

    def _check_quota(self, use: _CallerUsage, count: int, size: int) -> None:
        quota, reason = self._quota, "CALLER_QUOTA"
        if quota.queued is not None:
            slots = self._capacity.running if quota.running is None else quota.running
            waiting = use.queued + use.parked
            if use.running + waiting + count > slots + quota.queued:
                text = (
                    f"{use.running} of your rollouts run and {waiting} wait; the rest of the queue is for other callers"
                )
                raise Busy(text, retry_after=1.0, reason=reason)
        if quota.bytes is not None and (use.bytes or count > 1) and use.bytes + size > quota.bytes:
            text = (
                f"your rollouts hold {use.bytes // _MIB} MiB, at most {quota.bytes // _MIB} MiB are allowed per caller"
            )
            raise Busy(text, retry_after=1.0, reason=reason)
        if quota.starts_per_minute is not None:
            missing = min(count, quota.starts_per_minute) - use.starts
            if missing > 0:
                text = f"one caller may start {quota.starts_per_minute} rollouts a minute; ask again later"
                raise Busy(text, retry_after=60.0 * missing / quota.starts_per_minute, reason=reason)

    def _use(self, caller: str) -> _CallerUsage:
        """Return a caller's usage, with its token bucket of starts refilled up to this moment."""
        now, most = self._clock.monotonic(), self._quota.starts_per_minute or 0
        use = self._uses.get(caller)
        if use is None:
            use = self._uses[caller] = _CallerUsage(most, now)
        use.starts, use.at = min(most, use.starts + (now - use.at) * most / 60.0), now
        return use
