"""Holds responses back, so that a known number of rollouts waits for the trainer."""

from __future__ import annotations

import asyncio


class Hold:
    """Holds the last response of each rollout while it is closed. `waiting`: how many are held."""

    def __init__(self) -> None:
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Hold the following responses."""
        self._open.clear()

    def open(self) -> None:
        """Release all responses."""
        self._open.set()

    async def passed(self) -> None:
        """Return at once, or when the hold is opened."""
        if not self._open.is_set():
            self.waiting += 1
            await self._open.wait()
            self.waiting -= 1
