"""An event loop with virtual time: when nothing is ready, time jumps to the next timer.

Tests can wait for hours of the runtime's time without delay, and run identically on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors

# Loop iterations without a jump. Any test needs far fewer, so more of them mean an endless loop.
PATIENCE = 200_000


class Stuck(AssertionError):
    """The test would run forever: nothing is ready or scheduled, or something is always ready so that time does not advance."""


class _Selector(selectors.DefaultSelector):
    """A selector that never waits. It advances `now` instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._turns += 1
        if not ready and timeout is None:  # asyncio passes None if no callback is ready and no timer is set
            raise Stuck("nothing is ready and no timer is set")
        if self._turns > PATIENCE:
            raise Stuck("something is always ready, so time does not advance")
        if not ready and timeout:
            self.now += timeout
            self._turns = 0
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop for code without threads and sockets."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
