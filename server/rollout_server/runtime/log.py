"""The log of a rollout: the single list that watchers, replay and recordings read (D1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from rollout_server.core.error import Gone
from rollout_server.core.record import Ended, Record


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its position in the log.

    `sequence` counts from 1 without gaps. `time` is in seconds since 1970. `turn` and `segment_id` describe the rollout after
    the record; before the first turn they are 0 and empty.
    """

    sequence: int
    time: float
    record: Record
    turn: int = 0
    segment_id: str = ""


class Log:
    """Append-only list of entries. Readers pull from it and have no buffers, so a slow reader costs no memory.

    Lives on one event loop. `append` never awaits, so a reader that found no new entry and then waits cannot miss a wake-up.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._grown: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None

    @property
    def last_sequence(self) -> int:
        """Sequence number of the newest entry, 0 for an empty log."""
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries so far, oldest first."""
        return self._entries

    def append(self, records: Iterable[Record], time: float, turn: int = 0, segment_id: str = "") -> Sequence[Entry]:
        """Append records, wake the readers, and return the new entries."""
        last = len(self._entries)
        for record in records:
            self._entries.append(Entry(len(self._entries) + 1, time, record, turn, segment_id))
        # Each wake-up uses up its event: readers that wait again create another one, so an old reader never sees a stale event.
        if self._grown is not None:
            self._grown.set()
            self._grown = None
        if self._ended is not None and self._is_over():
            self._ended.set()
        return self._entries[last:]

    def check(self, after: int) -> None:
        """Raise `Gone` if the log has not reached this sequence number."""
        if after > self.last_sequence:
            raise Gone(f"there is no event {after} yet", oldest=1, newest=self.last_sequence)

    async def final_entry(self) -> Entry:
        """Wait for the rollout's last entry. Uses its own event, so intermediate entries do not wake the caller."""
        if not self._is_over():
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()
        return self._entries[-1]

    async def follow(self, after: int) -> AsyncIterator[Entry]:
        """Yield the entries after a sequence number, up to the rollout's last record.

        Raises `Gone` for a number that the log has not reached yet.
        """
        self.check(after)
        position = after
        while True:
            while position < len(self._entries):
                entry = self._entries[position]
                position += 1
                yield entry
                if isinstance(entry.record, Ended):
                    return
            if self._is_over():
                return
            self._grown = self._grown or asyncio.Event()
            await self._grown.wait()

    def _is_over(self) -> bool:
        return bool(self._entries) and isinstance(self._entries[-1].record, Ended)
