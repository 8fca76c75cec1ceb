"""Waiting for something that changes in the event loop."""

import asyncio
from collections.abc import Callable


class Notifier:
    """Rings when something may have changed; whoever waits then looks again."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes all who wait."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; it is looked at now and after each ring."""
        while not condition():
            await self._rung.wait()
