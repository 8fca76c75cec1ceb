"""Commits that fail: nothing is lost or reordered, the problem is named, and the journal goes on by itself."""

from __future__ import annotations

import logging
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.journal import JournalUnavailable, RolloutDropped
from rollout_server.runtime.ports import Credentials

from tests.edge.journal.store import accepted, appended, query, stored

AGAIN = "the journal can be written again"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let another connection write to the database, and not commit."""
    path = directory / "journal.sqlite3"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def fail(journal: SqliteJournal, uid: str) -> str:
    """Accept a rollout, which fails, and return why."""
    journal.write(accepted(uid))
    with pytest.raises(JournalUnavailable) as caught:
        await journal.flush(patient=False)
    assert journal.problem == str(caught.value)
    return journal.problem


async def test_a_disk_without_space(journal: SqliteJournal, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal.write(accepted("a"))
    await journal.flush()
    heard: list[int] = []
    with largest_file(200_000):
        for n in range(1, 301):
            journal.write(appended("a", n, n, text="x" * 1000), lambda n=n: heard.append(n))
        with pytest.raises(JournalUnavailable) as caught:
            await journal.flush(patient=False)
        text = str(caught.value)
        assert f"the journal {directory}/journal.sqlite3 cannot be written (disk I/O error): check its disk" in text
        assert "ulimit -f" in text
        assert heard == []
        journal.write(appended("a", 301, 301, text="x" * 1000), lambda: heard.append(301))
        with pytest.raises(JournalUnavailable):
            await journal.flush(patient=False)
        assert query(directory, "SELECT count(*) FROM entries") == [(0,)]
    await journal.flush()
    assert heard == [*range(1, 302)]
    assert journal.problem == ""
    assert errors(caplog) == [f"{text}; the server tries again, and refuses new rollouts until it succeeds", AGAIN]
    await journal.close()
    (a,) = await stored(directory)
    assert list(a.entries) == appended("a", 1, 301, text="x" * 1000).entries


async def test_a_full_database(journal: SqliteJournal, directory: Path) -> None:
    """SQLite's own limit of pages fails like a disk without space."""
    database = journal._database
    pages = query(directory, "PRAGMA page_count")[0][0]

    def limit(most: int) -> None:
        database._opened().connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")
        database._opened().connection.rollback()

    await journal._in_thread(lambda: limit(pages + 1))
    journal.write(accepted("a"))
    journal.write(appended("a", 1, 100, text="x" * 1000))
    with pytest.raises(JournalUnavailable, match=r"\(database or disk is full\): free some space on its disk"):
        await journal.flush(patient=False)
    assert query(directory, "SELECT count(*) FROM rollouts") == [(0,)]
    await journal._in_thread(lambda: limit(2**30))
    await journal.flush()
    await journal.close()
    (a,) = await stored(directory)
    assert len(a.entries) == 100


async def test_a_database_that_another_program_has_locked(journal: SqliteJournal, directory: Path) -> None:
    with locked(directory):
        text = await fail(journal, "a")
        assert "(database is locked): close the other program that has it open" in text
        journal.write(RolloutDropped("a"))
        journal.write(accepted("b"))
    await journal.flush()
    await journal.close()
    assert [rollout.start.uid for rollout in await stored(directory)] == ["b"]


async def test_a_deleted_database_that_is_put_back(
    journal: SqliteJournal, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, elsewhere = directory / "journal.sqlite3", directory / "elsewhere"
    journal.write(accepted("a"))
    await journal.flush()
    path.rename(elsewhere)
    text = await fail(journal, "b")
    assert f"{path}, or a file of SQLite beside it, is gone" in text
    assert "put the same file back" in text
    assert await fail(journal, "c") == text
    elsewhere.rename(path)
    await journal.flush()
    assert len(errors(caplog)) == 2
    assert errors(caplog)[1] == AGAIN
    await journal.close()
    assert [rollout.start.uid for rollout in await stored(directory)] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["journal.sqlite3", "journal.sqlite3-wal"])
async def test_a_replaced_file(journal: SqliteJournal, directory: Path, name: str) -> None:
    """A copy is another file: what SQLite writes goes to the one that it has opened."""
    path, elsewhere = directory / name, directory / "elsewhere"
    journal.write(accepted("a"))
    await journal.flush()
    path.rename(elsewhere)
    path.write_bytes(elsewhere.read_bytes())
    text = await fail(journal, "b")
    assert "was replaced by another file while the server runs" in text
    copied = path.read_bytes()
    elsewhere.replace(path)
    await journal.flush()
    assert copied


async def test_a_journal_that_is_closed_in_an_outage(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it loses, and gives its lock back."""
    monkeypatch.setattr("rollout_server.edge.journal.journal._CLOSE_SECONDS", 0.2)
    path, elsewhere = directory / "journal.sqlite3", directory / "elsewhere"
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(accepted("a"))
        await journal.flush()
        path.rename(elsewhere)
        await fail(journal, "b")
    assert "closing the journal without 1 changes: the journal" in caplog.text
    elsewhere.rename(path)
    assert [rollout.start.uid for rollout in await stored(directory)] == ["a"]


async def test_a_journal_that_is_closed_when_an_outage_is_over_loses_nothing(directory: Path) -> None:
    path, elsewhere = directory / "journal.sqlite3", directory / "elsewhere"
    async with SqliteJournal(directory) as journal:
        await journal.load()
        path.rename(elsewhere)
        await fail(journal, "a")
        elsewhere.rename(path)
    assert [rollout.start.uid for rollout in await stored(directory)] == ["a"]


async def test_what_the_last_commit_publishes_may_write_more(directory: Path) -> None:
    async with SqliteJournal(directory) as journal:
        await journal.load()

        def write(uid: str, following: str) -> None:
            more = (lambda: write(following[0], following[1:])) if following else None
            journal.write(accepted(uid), more)

        write("a", "bcd")
    assert [each.start.uid for each in await stored(directory)] == ["a", "b", "c", "d"]


async def test_an_error_without_advice_is_in_the_log_once(
    journal: SqliteJournal, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal.write(accepted("a", Credentials("sk-secret")))
    await journal.flush()
    with closing(sqlite3.connect(directory / "journal.sqlite3")) as connection:
        connection.execute("ALTER TABLE entries RENAME TO others")
    journal.write(appended("a", 1, 1, text="the text of a model"))
    for _ in range(2):
        with pytest.raises(JournalUnavailable, match="see the server's log"):
            await journal.flush(patient=False)
    with closing(sqlite3.connect(directory / "journal.sqlite3")) as connection:
        connection.execute("ALTER TABLE others RENAME TO entries")
    await journal.flush()
    assert [record.exc_info is not None for record in caplog.records].count(True) == 1
    assert "the text of a model" not in caplog.text
