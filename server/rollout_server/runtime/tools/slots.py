"""A number of places for work that may never end."""

from __future__ import annotations

import asyncio
from collections import deque


class NoFreeSlot(Exception):
    """Every place is held by work that was given up and goes on: waiting for one makes no sense."""


class Slots:
    """Lives on one event loop. Places are given in the order in which they were asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._lost = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def lost(self) -> int:
        """Places held by work that was given up."""
        return self._lost

    async def take(self) -> None:
        """Waits for a place. Raises `NoFreeSlot`."""
        if self._lost >= self.limit:
            raise NoFreeSlot
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled() and given.exception() is None:
                self.leave()  # it was given one in the same moment
            elif given in self._waiting:
                self._waiting.remove(given)
            raise

    def leave(self) -> None:
        """Gives a place back."""
        while self._waiting:
            given = self._waiting.popleft()
            if not given.done():
                given.set_result(None)
                return
        self._free += 1

    def lose(self) -> None:
        """The holder of a place was given up and goes on. Once all are lost, nobody waits any longer."""
        self._lost += 1
        while self._lost >= self.limit and self._waiting:
            given = self._waiting.popleft()
            if not given.done():
                given.set_exception(NoFreeSlot())

    def find(self) -> None:
        """A holder that was given up has ended after all."""
        self._lost -= 1
        self.leave()
