"""Delays responses: all of them as a generation would, and the last ones so that a known number of rollouts waits."""

from __future__ import annotations

import asyncio


class Hold:
    """Holds the last response of each rollout while it is closed. `waiting`: how many are held. `seconds`: delay of each."""

    def __init__(self) -> None:
        self.waiting = 0
        self.seconds = 0.0
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Hold the following responses."""
        self._open.clear()

    def open(self) -> None:
        """Release all responses."""
        self._open.set()

    async def passed(self, *, last: bool) -> None:
        """Return after the delay, and for a last response when the hold is open."""
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if last and not self._open.is_set():
            self.waiting += 1
            await self._open.wait()
            self.waiting -= 1
