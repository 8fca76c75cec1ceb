"""How late the event loop wakes a sleeper: the first sign of code that holds it, and of a machine that has too much to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopLag:
    """Sleeps again and again and tells `observe` how many seconds late it woke, never less than 0."""

    def __init__(self, observe: Callable[[float], None], interval: float = 0.1) -> None:
        self._observe = observe
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, on the running loop. Once begun it goes on until `stop`."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="loop lag")

    async def stop(self) -> None:
        """Ends."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = now() + self._interval
            await asyncio.sleep(self._interval)
            self._observe(max(0.0, now() - due))
