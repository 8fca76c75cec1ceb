"""The log of a rollout: the one list that watchers, replay and recordings read (D1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from rollout_server.core.error import Gone
from rollout_server.core.record import Ended, Record


@dataclass(frozen=True, slots=True)
class Entry:
    """A record at its place.

    `sequence` counts from 1 without gaps, `time` is in seconds since 1970; `turn` and `segment_id` are those of the rollout after
    the record, 0 and empty before the first.
    """

    sequence: int
    time: float
    record: Record
    turn: int = 0
    segment_id: str = ""


class Log:
    """Append-only. Readers pull and are woken; none has a buffer of its own, so a slow one costs nothing."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._grown: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None

    @property
    def last_sequence(self) -> int:
        """The number of the newest entry, 0 if there is none."""
        return len(self._entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries so far."""
        return self._entries

    def append(self, records: Iterable[Record], time: float, turn: int = 0, segment_id: str = "") -> Sequence[Entry]:
        """Adds records and wakes the readers. Returns the entries that were added."""
        last = len(self._entries)
        for record in records:
            self._entries.append(Entry(len(self._entries) + 1, time, record, turn, segment_id))
        if self._grown is not None:
            self._grown.set()
            self._grown = None
        if self._ended is not None and self._is_over():
            self._ended.set()
        return self._entries[last:]

    def check(self, after: int) -> None:
        """Raises `Gone` for a sequence number that is not reached yet."""
        if after > self.last_sequence:
            raise Gone(f"there is no event {after} yet", oldest=1, newest=self.last_sequence)

    async def final_entry(self) -> Entry:
        """The last entry of the rollout, once it is there. Whoever only wants the end is not woken for all the others."""
        if not self._is_over():
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()
        return self._entries[-1]

    async def follow(self, after: int) -> AsyncIterator[Entry]:
        """The entries after a sequence number, until the last record of the rollout. Raises `Gone` for numbers not reached yet."""
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
