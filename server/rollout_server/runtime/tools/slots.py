"""A semaphore for work that may never end: slots can be lost, and found again."""

from __future__ import annotations

import asyncio
from collections import deque


class NoFreeSlot(Exception):
    """Every slot is held by work that was given up and goes on: waiting for one makes no sense."""


class Slots:
    """Lives on one event loop. Slots are given in the order in which they were requested."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._lost = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def lost(self) -> int:
        """Slots held by work that was given up."""
        return self._lost

    async def acquire(self) -> None:
        """Waits for a slot. Raises `NoFreeSlot`."""
        if self._lost >= self.limit:
            raise NoFreeSlot
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()  # it was given one in the same moment
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        """Gives a slot back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def lose(self) -> None:
        """The holder of a slot was given up and goes on. Once all are lost, nobody waits any longer."""
        self._lost += 1
        while self._lost >= self.limit and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(NoFreeSlot())

    def recover(self) -> None:
        """A holder that was given up has ended after all."""
        self._lost -= 1
        self.release()
