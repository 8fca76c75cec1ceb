"""When a stream acknowledges the trainer's items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_MOST: Final = 64
_SECONDS: Final = 0.05
"""How many items wait for an acknowledgement, and for how long, if the trainer waits for none of them."""


class Acknowledgement:
    """Acknowledges answers together: a trainer only keeps them until then, and each acknowledgement costs as much as a request.

    Args:
        wake: makes the stream's sender look again.

    Attributes:
        seen: the trainer's last sequence number that was processed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.seen = 0
        self._wake = wake
        self._sent = 0
        self._due = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self, sequence: int, *, at_once: bool) -> None:
        """Note the number of an item that is processed. `at_once`: the trainer may wait for its acknowledgement."""
        self.seen = sequence
        if at_once or sequence - self._sent >= _MOST:
            self._become_due()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._become_due)

    def next(self, *, at_once: bool) -> int | None:
        """Return the number to acknowledge now; None if there is none."""
        if self.seen == self._sent or not (at_once or self._due):
            return None
        self.reset()
        return self.seen

    def reset(self) -> None:
        """Note that everything is acknowledged."""
        self._sent, self._due = self.seen, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _become_due(self) -> None:
        self._due = True
        self._wake()
