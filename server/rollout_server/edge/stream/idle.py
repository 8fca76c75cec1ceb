"""When a stream tells its trainer that no further completion is requested for now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_PASSES: Final = 32
"""How long a stream must be idle, in passes of the event loop.

From the end of one completion or tool call to the next one, an agent's tasks may need some passes, for example through nested calls
of `asyncio.gather`. In these passes nothing of the agent is under way.
"""


class IdleSignal:
    """Signals an idle stream, once after each numbered item of either side.

    Args:
        wake: makes the stream's sender look again.

    Attributes:
        wanted: whether the trainer wants it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wanted = False
        self._wake = wake
        self._position: tuple[int, int] | None = None
        self._passes = 0
        self._signalled = False

    def restart(self) -> None:
        """Begin to count again: something has changed in a rollout."""
        self._passes = 0

    def reset(self) -> None:
        """Signal again, also without a further item: what was sent may not have arrived."""
        self._position = None

    def is_due(self, position: tuple[int, int], is_idle: Callable[[], bool], *, at_once: bool) -> bool:
        """Return whether to send `idle` now. Called when there is nothing else to send, also on each `wake`.

        Args:
            position: numbers of the last numbered items that were sent and processed.
            is_idle: whether the stream is idle now.
            at_once: whatever the rollouts do, they change nothing.
        """
        if position != self._position:
            self._position, self._passes, self._signalled = position, 0, False
        if not self.wanted or self._signalled:
            return False
        if at_once:
            self._passes = _PASSES
        if self._passes in (0, _PASSES) and not is_idle():  # in between, what changes calls `restart`
            self._passes = 0
            return False
        self._signalled = self._passes == _PASSES
        self._passes += 1
        if not self._signalled:
            asyncio.get_running_loop().call_soon(self._wake)
        return self._signalled
