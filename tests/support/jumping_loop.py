"""An event loop whose time jumps: when nothing is ready, it is at once as late as the next timer wants it to be.

Tests wait for hours of the runtime's time in no time, and what happens is the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors

PATIENCE = 200_000


class Stuck(AssertionError):
    """The test would run for ever: nothing is ready and nothing is timed, or something is always ready and time stands still."""


class _Selector(selectors.DefaultSelector):
    """Never waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._turns += 1
        if not ready and timeout is None:
            raise Stuck("nothing is ready and nothing is timed")
        if self._turns > PATIENCE:
            raise Stuck("something is always ready, and time stands still")
        if not ready and timeout:
            self.now += timeout
            self._turns = 0
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """For code without threads and sockets."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
