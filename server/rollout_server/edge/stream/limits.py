"""How much of streams there may be, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times in seconds.

    Args:
        grace: how long a cut stream is kept.
        timeout: how long an ask that was sent may stay unanswered.
        streams, of_caller: streams at the same time, in all and of one caller, the cut ones among them.
        rollouts: rollouts of one stream whose outcomes are not acknowledged.
        unacknowledged: items with a sequence that were sent and not acknowledged; so many refusals may wait to be sent as well.
    """

    grace: float = 30.0
    timeout: float = 300.0
    streams: int = 1000
    of_caller: int = 100
    rollouts: int = 10_000
    unacknowledged: int = 1024
