"""Segments that a trainer is to show. They are not sent again after a cut: nobody waits for them that long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rollout_server.edge.stream.stream_rollout import LedgerRead
from rollout_server.edge.trainer.grpc_client import Held


class LedgerReads:
    """At most one of each segment."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], LedgerRead] = {}
        self._to_send: deque[LedgerRead] = deque()

    def add(self, reading: LedgerRead) -> None:
        """Somebody waits for it."""
        self._open[reading.uid, reading.segment_id] = reading
        self._to_send.append(reading)

    def drop(self, reading: LedgerRead) -> None:
        """Nobody waits for it any more."""
        if self._open.get((reading.uid, reading.segment_id)) is reading:
            del self._open[reading.uid, reading.segment_id]

    def next(self) -> LedgerRead | None:
        """The next one to send."""
        while self._to_send:
            reading = self._to_send.popleft()
            if not reading.held.done():
                return reading
        return None

    def shown(self, uid: str, segment_id: str, held: Callable[[], Held | None]) -> None:
        """The trainer shows one, or says that it does not."""
        reading = self._open.pop((uid, segment_id), None)
        if reading is not None and not reading.held.done():
            reading.held.set_result(held)

    def lose(self) -> None:
        """The connection broke: none is shown."""
        for reading in self._open.values():
            if not reading.held.done():
                reading.held.set_result(None)
        self._open.clear()
        self._to_send.clear()
