"""Waiting for something that changes in the event loop."""

import asyncio
from collections.abc import Callable


class Notifier:
    """Notifies when something may have changed; whoever waits then looks again."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes all who wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds; it is looked at now and after each notification."""
        while not condition():
            await self._changed.wait()
