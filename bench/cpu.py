"""CPU of this process with all its threads: what work takes beyond what the process takes anyway while it waits.

A process that waits is not idle: timers beat and threads poll, by the clock and not by the turn. A trainer takes longer over a long
prompt, so what is taken meanwhile would show the trainer's time as growth of this side's cost.
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
    """`rest` is what the process takes while it only waits, in milliseconds of CPU a second."""

    rest: float = 0.0

    @classmethod
    async def at_rest(cls) -> Meter:
        """Waits some times and takes the least, so that rather too little is taken off than too much."""
        rests = []
        for _ in range(_LOOKS):
            began, clock = time.process_time(), time.monotonic()
            await asyncio.sleep(_SECONDS)
            rests.append(1000 * (time.process_time() - began) / (time.monotonic() - clock))
        return cls(min(rests))

    def start(self) -> Callable[[], float]:
        """Begins. What it returns tells how many milliseconds of CPU were taken since then, without those of waiting."""
        began, clock = time.process_time(), time.monotonic()
        return lambda: 1000 * (time.process_time() - began) - self.rest * (time.monotonic() - clock)
