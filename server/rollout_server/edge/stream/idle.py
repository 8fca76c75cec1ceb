"""When a stream tells its trainer that no further completion is requested for now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_PASSES: Final = 8
"""How many times in a row a stream must be found idle. The event loop runs once in between.

From the end of one completion or tool call to the next one, an agent's tasks may need some passes of the event loop, for example
through `asyncio.gather`. In these passes nothing of the agent is under way.
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

    def reset(self) -> None:
        """Signal again, also without a further item: what was sent may not have arrived."""
        self._position = None

    def is_due(self, position: tuple[int, int], is_idle: Callable[[], bool]) -> bool:
        """Return whether to send `idle` now. Called when there is nothing else to send, also on each `wake`.

        Args:
            position: numbers of the last numbered items that were sent and processed.
            is_idle: whether the stream is idle now.
        """
        if position != self._position:
            self._position, self._passes = position, 0
        if not self.wanted or self._passes > _PASSES:  # nobody wants it, or it was sent at this position
            return False
        if not is_idle():
            self._passes = 0
            return False
        self._passes += 1
        if self._passes > _PASSES:
            return True
        asyncio.get_running_loop().call_soon(self._wake)
        return False
