"""The log of a rollout: the single list that watchers, replay and recordings read (D1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout_server.core.error import Gone, RolloutError
from rollout_server.core.record import Ended, Record, Resumed


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its position in the log.

    `sequence` counts from 1 without gaps. `time` is in seconds since 1970; it never decreases, and within one process it does not
    follow a wall clock that is set meanwhile. `turn` and `segment_id` describe the rollout after the record; before the first turn
    they are 0 and empty.
    """

    sequence: int
    time: float
    record: Record
    turn: int = 0
    segment_id: str = ""


def running_seconds(entries: Iterable[Entry]) -> float:
    """Return the seconds from the first entry to the last one, without the downtime of the server before each `Resumed`."""
    pairs = ((before, after) for before, after in pairwise(entries) if not isinstance(after.record, Resumed))
    return sum(max(0.0, after.time - before.time) for before, after in pairs)


class Log:
    """Append-only list of entries. Readers pull from it and have no buffers, so a slow reader costs no memory.

    An entry is appended first and published once it is stored: after a crash, a number that a reader has seen always stands for
    the same record. Readers see only published entries.

    Lives on one event loop. `publish` never awaits, so a reader that found no new entry and then waits cannot miss a wake-up.

    Attributes:
        is_over: whether the rollout's last entry is published.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: list[Entry] = [*entries]
        self._published = len(self._entries)
        self._grown: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None
        self._problem: RolloutError | None = None
        self.is_over = self._has_ended()

    @property
    def last_sequence(self) -> int:
        """Sequence number of the newest published entry, 0 if there is none."""
        return self._published

    @property
    def is_abandoned(self) -> bool:
        """Whether it never gets a last entry."""
        return self._problem is not None

    @property
    def records(self) -> Sequence[Record]:
        """The records of all entries so far."""
        return [entry.record for entry in self._entries]

    @property
    def resumption(self) -> Resumed:
        """The record that the rollout continues after a restart of the server."""
        return Resumed(1 + sum(isinstance(record, Resumed) for record in self.records))

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries so far, oldest first; the first `last_sequence` of them are published."""
        return self._entries

    def append(self, records: Iterable[Record], time: float, turn: int = 0, segment_id: str = "") -> Sequence[Entry]:
        """Append records and return the new entries, which are not published yet."""
        last = len(self._entries)
        for record in records:
            self._entries.append(Entry(len(self._entries) + 1, time, record, turn, segment_id))
        return self._entries[last:]

    def publish(self, last_sequence: int) -> None:
        """Publish the entries up to a sequence number, and wake the readers."""
        self._published = last_sequence
        self.is_over = self._has_ended()
        self._wake()

    def abandon(self, problem: RolloutError) -> None:
        """Raise `problem` to all readers: the rollout is forgotten without an end."""
        self._problem = problem
        self._wake()

    def _has_ended(self) -> bool:
        return self._published > 0 and isinstance(self._entries[self._published - 1].record, Ended)

    def _wake(self) -> None:
        # Each wake-up uses up its event: readers that wait again create another one, so an old reader never sees a stale event.
        if self._grown is not None:
            self._grown.set()
            self._grown = None
        if self._ended is not None and (self.is_over or self.is_abandoned):
            self._ended.set()

    def check(self, after: int) -> None:
        """Raise `Gone` if the log has not reached this sequence number."""
        if after > self.last_sequence:
            raise Gone(f"there is no event {after} yet", oldest=1, newest=self.last_sequence)

    async def final_entry(self) -> Entry:
        """Wait for the rollout's last entry. Uses its own event, so intermediate entries do not wake the caller.

        Raises the problem of `abandon`.
        """
        if not (self.is_over or self.is_abandoned):
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()
        if self._problem is not None:
            raise self._problem
        return self._entries[-1]

    async def follow(self, after: int) -> AsyncIterator[Entry]:
        """Yield the entries after a sequence number, up to the rollout's last record.

        Raises `Gone` for a number that the log has not reached yet, and the problem of `abandon`.
        """
        self.check(after)
        position = after
        while True:
            while position < self._published:
                entry = self._entries[position]
                position += 1
                yield entry
                if isinstance(entry.record, Ended):
                    return
            if self.is_over:
                return
            if self._problem is not None:
                raise self._problem
            self._grown = self._grown or asyncio.Event()
            await self._grown.wait()
