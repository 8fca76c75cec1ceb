"""CPU of this process and all its threads, without the background CPU that it also uses while it waits.

A waiting process is not idle: timers fire and threads poll, by the clock and not per turn. A trainer takes longer for a long
prompt, and this process uses more background CPU meanwhile. Without the correction, the trainer's time would look like a cost
of this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

_LOOKS = 4
_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Meter:
    """CPU meter. `rest` is the background CPU of the waiting process, in milliseconds per second."""

    rest: float = 0.0

    @classmethod
    async def at_rest(cls) -> Meter:
        """Measure the background CPU several times and take the minimum, so that it is not overestimated."""
        rests = []
        for _ in range(_LOOKS):
            began, clock = time.process_time(), time.monotonic()
            await asyncio.sleep(_SECONDS)
            rests.append(1000 * (time.process_time() - began) / (time.monotonic() - clock))
        return cls(min(rests))

    def start(self) -> Callable[[], float]:
        """Start measuring. The returned function returns the milliseconds of CPU since then, minus the background CPU."""
        began, clock = time.process_time(), time.monotonic()
        return lambda: 1000 * (time.process_time() - began) - self.rest * (time.monotonic() - clock)
