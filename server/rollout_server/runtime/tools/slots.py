"""A semaphore for work that may never end: its slots can be lost and recovered."""

from __future__ import annotations

import asyncio
from collections import deque

from rollout_server.runtime.activity import waiting_for_slot


class NoFreeSlot(Exception):
    """Abandoned work holds every slot, so waiting for a slot would not end."""


class Slots:
    """A fair semaphore: slots are granted in the order of the requests. Lives on one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._lost = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def lost(self) -> int:
        """Number of slots that abandoned work holds."""
        return self._lost

    async def acquire(self) -> None:
        """Wait for a slot. Raise `NoFreeSlot`."""
        if self._lost >= self.limit:
            raise NoFreeSlot
        if self._free:  # then no task waits: `release` serves waiting tasks first
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with waiting_for_slot(turn):
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()  # the slot was granted just before the cancellation: pass it on, or it would leak
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        """Return a slot, or grant it to the next waiting task."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def lose(self) -> None:
        """Mark the slot of an abandoned call as lost. Once all slots are lost, all waiting tasks get `NoFreeSlot`."""
        self._lost += 1
        while self._lost >= self.limit and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(NoFreeSlot())

    def recover(self) -> None:
        """Return a lost slot: the abandoned call has ended after all."""
        self._lost -= 1
        self.release()
