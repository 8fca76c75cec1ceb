"""The journal of a server in a directory: an SQLite database that one thread writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from rollout_server.edge.journal.database import Database
from rollout_server.edge.journal.files import JournalDirectory
from rollout_server.edge.journal.schema import MIGRATIONS, Migration
from rollout_server.edge.journal.writer import CommitQueue
from rollout_server.runtime.journal import (
    Change,
    EntriesAppended,
    GroupChange,
    GroupDropped,
    GroupFormed,
    RolloutAccepted,
    RolloutDropped,
    StoredGroup,
    StoredRollout,
)

_log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for the last commit, and again for the database to be closed."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _JournalPosition:
    """Where a rollout stands in the journal: its number, and the sequence number of its newest record."""

    number: int
    last_sequence: int = 0


class SqliteJournal:
    """The durable `Journal`. Between `start` and `close` it holds the lock of its directory.

    The space of dropped rollouts is used again, so the database keeps the size that it had at most. A rollout that cannot be
    encoded, which is a bug, does not stop the others: it is logged, deleted from the journal, and continues as with a
    `MemoryJournal`.

    Args:
        directory: created if there is none.
        key: a Fernet key that encrypts credentials. None: a key in the directory, created if there is none.
        migrations: how tables of older versions become those of the newest one.
    """

    is_durable = True

    def __init__(
        self, directory: Path, key: str | None = None, *, migrations: Sequence[Migration] = MIGRATIONS
    ) -> None:
        self._database = Database(JournalDirectory(directory), key, migrations)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._queue: CommitQueue[tuple[int, Change] | None] | None = None
        self._server_id = ""
        self._positions: dict[str, _JournalPosition] = {}
        self._groups: dict[str, int] = {}
        self._is_loaded = False
        self._last_number = 0
        # Written by the journal's thread, which replaces it, and read on the event loop.
        self._unencodable: frozenset[int] = frozenset()

    @property
    def server_id(self) -> str:
        """Id of the server, from the database."""
        return self._server_id

    @property
    def problem(self) -> str:
        """Why the last commit failed and what to do, or empty."""
        return self._queue.problem if self._queue is not None else ""

    async def start(self) -> None:
        """Take the lock and open the database. Raises `JournalUnusable`, and then has changed nothing that was there."""
        try:
            self._server_id = await self._in_thread(self._database.open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._queue = CommitQueue(self._commit, self._thread)

    async def close(self) -> None:
        """Commit what is pending, close the database, and release the lock. Takes a few seconds at most."""
        if self._queue is None:
            return
        await self._queue.close(_CLOSE_SECONDS)
        self._queue = None
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._in_thread(self._database.close)
        except TimeoutError:
            _log.error("the journal was not closed within %g s; its disk may be too slow", _CLOSE_SECONDS)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> SqliteJournal:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def load(self) -> Sequence[StoredRollout]:
        """Return the rollouts of earlier processes. Raises `JournalUnusable` if one is damaged or the key is another one."""
        stored = await self._in_thread(self._database.load)
        self._is_loaded = True
        for number, rollout in stored:
            self._positions[rollout.start.uid] = _JournalPosition(number, len(rollout.entries))
            self._last_number = number
        return [rollout for _, rollout in stored]

    async def load_groups(self) -> Sequence[StoredGroup]:
        """Return the groups of earlier processes. Raises `JournalUnusable` if one is damaged."""
        stored = await self._in_thread(self._database.load_groups)
        for number, each in stored:
            self._groups[each.group.uid] = number
            self._last_number = max(self._last_number, number)
        return [group for _, group in stored]

    def write(self, change: Change, committed: Callable[[], None] | None = None) -> None:
        """Store a change with the next commit.

        Changes of a rollout that was dropped are ignored, except entries. Raises `ValueError` for a rollout that was accepted
        before, and for entries that do not continue the log.
        """
        queue = self._opened_queue()
        queue.add(self._numbered(change), committed)

    async def flush(self, *, patient: bool = True) -> None:
        """Wait until all changes so far are committed."""
        await self._opened_queue().flush(patient=patient)

    def _opened_queue(self) -> CommitQueue[tuple[int, Change] | None]:
        if self._queue is None or not self._is_loaded:
            raise RuntimeError("the journal is not open, or was not loaded")
        return self._queue

    def _numbered(self, change: Change) -> tuple[int, Change] | None:
        """Return the change with the number of its rollout; None if there is nothing to store."""
        if isinstance(change, EntriesAppended):
            position = _advanced(self._positions.get(change.uid), change)
        elif isinstance(change, GroupChange):
            return self._numbered_group(change)
        elif isinstance(change, RolloutAccepted):
            position = self._accept(change.start.uid)
        else:
            found = self._positions.get(change.uid)
            if found is None:
                return None
            position = found
            if isinstance(change, RolloutDropped):
                del self._positions[change.uid]
        return None if position.number in self._unencodable else (position.number, change)

    def _numbered_group(self, change: GroupChange) -> tuple[int, Change] | None:
        """Return the change with the number of its group; None if the group was dropped."""
        if isinstance(change, GroupFormed):
            number = self._groups[change.group.uid] = self._next_number()
        elif isinstance(change, GroupDropped):
            number = self._groups.pop(change.uid, 0)
        else:
            number = self._groups.get(change.uid, 0)
        return (number, change) if number else None

    def _accept(self, uid: str) -> _JournalPosition:
        if uid in self._positions:
            raise ValueError(f"rollout {uid} is in the journal already")
        self._positions[uid] = _JournalPosition(self._next_number())
        return self._positions[uid]

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _commit(self, changes: Sequence[tuple[int, Change] | None]) -> None:
        # A change may have been written before it was known that its rollout cannot be encoded.
        unencodable = self._database.commit([each for each in changes if each and each[0] not in self._unencodable])
        if unencodable:
            self._unencodable |= unencodable

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _advanced(position: _JournalPosition | None, change: EntriesAppended) -> _JournalPosition:
    """Return the position after new entries. A gap would make the journal unusable, so it is refused here."""
    if position is None:
        raise ValueError(f"rollout {change.uid} is not in the journal")
    last = position.last_sequence
    for expected, entry in enumerate(change.entries, start=last + 1):
        if entry.sequence != expected:
            sequences = [each.sequence for each in change.entries]
            raise ValueError(f"rollout {change.uid} has records up to {last} in the journal; these are {sequences}")
    position.last_sequence += len(change.entries)
    return position
