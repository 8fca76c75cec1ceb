"""What a trainer counts: correct and wrong requests, their bytes, and the gap between a response and the next request."""

from __future__ import annotations

import time
from array import array
from math import ceil

import msgspec

_FAULTS_KEPT = 5


class Counts(msgspec.Struct):
    """Counts of requests. `masks_refused` and `histories_refused` must stay 0; `faults` describes the first faults.

    A mask also counts as accepted if a digest over all tokens and their authors was equal to the trainer's.
    """

    answered: int = 0
    masks_accepted: int = 0
    masks_refused: int = 0
    histories_refused: int = 0
    faults: list[str] = []


class Traffic(msgspec.Struct, frozen=True):
    """Requests since the last reading.

    Args:
        requests: their number.
        sent: size of their bodies in bytes.
        gap_p50, gap_p99: percentiles of the milliseconds from a response to the next request of the same rollout, or from a
            start that the trainer requested to the first one.
    """

    requests: int
    sent: int
    gap_p50: float
    gap_p99: float


class Tally:
    """Counts and times of all requests of one trainer."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._answered_at: dict[str, float] = {}
        self._gaps = array("d")
        self._requests = 0
        self._sent = 0

    def receive(self, rollout: str, size: int) -> None:
        """Record the arrival of a request of `size` bytes. `rollout` may be empty: unknown."""
        self._requests += 1
        self._sent += size
        answered = self._answered_at.pop(rollout, None)
        if answered is not None:
            self._gaps.append(time.perf_counter() - answered)

    def start(self, rollout: str) -> None:
        """Record the start of a rollout: its first request is due now."""
        self._answered_at[rollout] = time.perf_counter()

    def answer(self, rollout: str, *, last: bool) -> None:
        """Record a response. No request follows the last one of a rollout."""
        self.counts.answered += 1
        if rollout and not last:
            self._answered_at[rollout] = time.perf_counter()

    def refuse(self, fault: str, *, mask: bool) -> None:
        """Record a wrong mask, or a wrong history."""
        if mask:
            self.counts.masks_refused += 1
        else:
            self.counts.histories_refused += 1
        if len(self.counts.faults) < _FAULTS_KEPT:
            self.counts.faults.append(fault)

    def take(self) -> Traffic:
        """Return the traffic since the last call, and forget it."""
        gaps, requests, sent = sorted(self._gaps), self._requests, self._sent
        self._gaps, self._requests, self._sent = array("d"), 0, 0
        return Traffic(requests, sent, percentile_ms(gaps, 0.5), percentile_ms(gaps, 0.99))


def percentile_ms(ordered: list[float], share: float) -> float:
    """Return a percentile of ascending seconds in milliseconds; 0 if there are none."""
    return 1000 * ordered[ceil(share * len(ordered)) - 1] if ordered else 0.0
