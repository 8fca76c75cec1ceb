"""Changes and a journal for the tests of the store."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rollout_server.core.record import Note, Record
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.journal import AcceptedStart, EntriesAppended, RolloutAccepted, StoredRollout
from rollout_server.runtime.log import Entry
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.start_request import StartRequest

from tests.support.runtime_harness import a_spec

NONE = Credentials()


def accepted(uid: str, credentials: Credentials = NONE) -> RolloutAccepted:
    request = StartRequest(a_spec(rollout_id=uid), "team-a", request_id=f"request of {uid}", credentials=credentials)
    return RolloutAccepted(AcceptedStart(uid, request, "f" * 64, "1.2", 1700000000.5))


def appended(uid: str, first: int, last: int, *, text: str = "text") -> EntriesAppended:
    """Notes with these sequence numbers."""
    records: Sequence[tuple[int, Record]] = [(n, Note(0, "code", f"{text} {n}")) for n in range(first, last + 1)]
    return EntriesAppended(uid, [Entry(n, 1700000000.25 + n, record) for n, record in records])


async def stored(directory: Path, key: str | None = None) -> Sequence[StoredRollout]:
    """What another process would load."""
    async with SqliteJournal(directory, key) as journal:
        return await journal.load()


def query(directory: Path, statement: str) -> list[Any]:
    """Rows of the database, read by another connection."""
    with closing(sqlite3.connect(directory / "journal.sqlite3")) as connection, connection:
        return connection.execute(statement).fetchall()


def files(directory: Path) -> dict[str, bytes]:
    """Contents of all files; none if there is no such directory."""
    if not directory.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def permissions(directory: Path) -> dict[str, int]:
    """Permissions of a directory and of what is in it."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
