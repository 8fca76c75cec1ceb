"""A wake-up for coroutines that wait for a condition."""

import asyncio
from collections.abc import Callable


class Notifier:
    """Wakes waiting coroutines, which then check their condition again. One event loop only."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. It is checked at once and after each notification."""
        while not condition():
            await self._changed.wait()
