"""CPU of this process with all its threads: what work takes beyond what the process takes anyway while it waits.

A process that waits is not idle: timers beat and threads poll, by the clock and not by the turn. A trainer that judges a long prompt
takes longer over it, and counted with the turns this would show the trainer's time as growth of our cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Meter:
    """`rest` is what the process takes while it only waits, in milliseconds of CPU a second."""

    rest: float = 0.0

    @classmethod
    async def at_rest(cls) -> Meter:
        """Waits, and sees what that takes."""
        began, clock = time.process_time(), time.monotonic()
        await asyncio.sleep(_SECONDS)
        return cls(1000 * (time.process_time() - began) / (time.monotonic() - clock))

    def start(self) -> Callable[[], float]:
        """Begins. What it returns tells how many milliseconds of CPU were taken since then, without those of waiting."""
        began, clock = time.process_time(), time.monotonic()
        return lambda: 1000 * (time.process_time() - began) - self.rest * (time.monotonic() - clock)
