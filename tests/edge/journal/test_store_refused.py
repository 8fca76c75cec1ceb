"""Journals with which a server refuses to start. What is on the disk stays as it was, and the text says what to do."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from osmosis.journal.v1 import journal_pb2 as pb
from rollout_server.core.ledger import Prediction
from rollout_server.core.message import Message
from rollout_server.core.record import Answered
from rollout_server.edge.journal import SqliteJournal
from rollout_server.edge.journal.dropping import drop_rollouts
from rollout_server.edge.journal.records import encode_entries
from rollout_server.edge.journal.schema import MIGRATIONS
from rollout_server.edge.journal.values import encode_tokens
from rollout_server.runtime.journal import (
    CancelRequested,
    DeliveryChanged,
    FormedGroup,
    GroupFormed,
    JournalUnusable,
    StoredDelivery,
)
from rollout_server.runtime.log import Entry
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.ports import Credentials
from sqlalchemy import Connection

from tests.edge.journal.store import accepted, appended, files, query, stored
from tests.support.journal_versions import TO_VERSION_1, TO_VERSION_3

NOBODY = 65534
DATABASE = "journal.sqlite3"


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of a user whom permissions stop; root runs the test as another user."""
    path = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        yield path
        os.seteuid(0)
    else:
        yield path
    path.chmod(0o700)
    shutil.rmtree(path)


@pytest.fixture
async def written(directory: Path) -> Path:
    """The directory of a journal with two rollouts, which is closed."""
    async with SqliteJournal(directory) as journal:
        await journal.load()
        for uid in "ab":
            journal.write(accepted(uid, Credentials("sk-secret")))
            journal.write(appended(uid, 1, 30, text="x" * 1000))
    return directory


async def refused(directory: Path, key: str | None = None) -> str:
    """The text with which a server does not start, having changed no file."""
    before = {"lock": b"", **files(directory)}
    with pytest.raises(JournalUnusable) as caught:
        await SqliteJournal(directory, key).start()
    assert {"lock": b"", **files(directory)} == before
    return str(caught.value)


async def refused_load(directory: Path, key: str | None = None) -> str:
    """The text with which a server does not load the rollouts, having changed no row."""
    before = rows(directory)
    async with SqliteJournal(directory, key) as journal:
        with pytest.raises(JournalUnusable) as caught:
            await journal.load()
    assert rows(directory) == before
    return str(caught.value)


def rows(directory: Path) -> list[str]:
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        return [*connection.iterdump()]


def execute(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / DATABASE)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


async def test_a_second_server(directory: Path) -> None:
    async with SqliteJournal(directory) as journal:
        with pytest.raises(
            JournalUnusable, match=f"the journal {directory} is in use by another server.*stop that server"
        ):
            await SqliteJournal(directory).start()
        await journal.load()
        journal.write(accepted("a"))
        await journal.flush(patient=False)
    assert len(await stored(directory)) == 1


async def test_a_directory_that_is_a_file_or_below_one(written: Path) -> None:
    for path in (written / DATABASE, written / DATABASE / "below"):
        text = await refused(path)
        assert text.startswith(f"the journal's directory {path} cannot be used: ")
        assert "use another directory" in text
    assert len(await stored(written)) == 2


async def test_a_directory_that_everybody_may_write(written: Path) -> None:
    os.chmod(written, 0o757)
    with pytest.raises(JournalUnusable, match=r"has mode 0757, .* chmod 0700 it"):
        await SqliteJournal(written).start()
    os.chmod(written, 0o770)  # as volumes of Kubernetes have it
    assert len(await stored(written)) == 2


async def test_a_directory_that_may_not_be_written(unprivileged: Path) -> None:
    os.chmod(unprivileged, 0o500)
    for path in (unprivileged, unprivileged / "below"):
        text = await refused(path)
        assert text.startswith(f"the journal's directory {path} cannot be used: Permission denied")


async def test_a_database_that_may_not_be_written(unprivileged: Path) -> None:
    directory = unprivileged / "journal"
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(accepted("a"))
    (directory / DATABASE).chmod(0o400)
    text = await refused(directory)
    assert text.startswith(f"the journal {directory}/{DATABASE} cannot be written: Permission denied")
    (directory / DATABASE).chmod(0o600)
    directory.chmod(0o500)
    text = await refused(directory)
    assert "(attempt to write a readonly database): make the file, its directory and its file system writable" in text
    directory.chmod(0o700)
    assert len(await stored(directory)) == 1


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: overwrite(path, 0, b"nonsense"), "is not an SQLite database, or its beginning is damaged"),
        (lambda path: path.write_bytes(b""), "is not an SQLite database, or its beginning is damaged"),
        (lambda path: path.write_bytes(b"SQLite format 3\0"), "is not an SQLite database, or its beginning is damaged"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "is damaged (database disk image is malformed)"),
        (lambda path: overwrite(path, 4096 * 2, b"\xff" * 4096 * 2), "is damaged ("),
    ],
)
async def test_damaged_files(written: Path, damage: Callable[[Path], object], text: str) -> None:
    damage(written / DATABASE)
    found = await refused(written)
    assert text in found
    assert found.startswith(f"{written}/{DATABASE} is ")
    assert "restore it from a backup" in found


async def test_a_database_that_is_gone_while_its_log_is_not(written: Path) -> None:
    (written / DATABASE).unlink()
    (written / f"{DATABASE}-wal").write_bytes(b"changes")
    assert f"{DATABASE}-wal has changes of a database that is gone: put {written}/{DATABASE} back" in await refused(
        written
    )


async def test_a_database_of_another_application(directory: Path) -> None:
    os.mkdir(directory)
    execute(directory, "CREATE TABLE bookmarks (url TEXT)", "PRAGMA user_version = 1")
    assert "is an SQLite database, but not a journal of this server: move it away" in await refused(directory)


async def test_a_newer_server_wrote_it(written: Path) -> None:
    execute(written, "PRAGMA user_version = 7")
    text = await refused(written)
    assert "was written by a newer server: it has version 7, and this server knows versions up to 4" in text
    assert "Run the newer server" in text


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("DELETE FROM meta", "it has no server id"),
        ("PRAGMA user_version = 0", "its tables have no version"),
        ("DROP TABLE meta", "no such table: meta"),
    ],
)
async def test_tables_that_no_server_leaves(written: Path, statement: str, text: str) -> None:
    execute(written, statement)
    found = await refused(written)
    assert text in found
    assert f"{written}/{DATABASE}" in found


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        (
            "UPDATE entries SET payload = x'ff', payload_crc32 = NULL WHERE rollout = 2",
            "rollout b cannot be read (ValueError: these bytes are not log entries",
        ),
        (
            "UPDATE rollouts SET start = x'ff', start_crc32 = NULL WHERE number = 2",
            "rollout b cannot be read (ValueError: these bytes are not an accepted start",
        ),
        (
            "UPDATE rollouts SET uid = 'c' WHERE number = 2",
            "rollout c cannot be read (ValueError: it was accepted as b)",
        ),
        (
            "INSERT INTO deliveries VALUES (2, 'lost', 1, '', NULL, NULL, 1.0)",
            "rollout b cannot be read (ValueError",
        ),
        (
            "INSERT INTO deliveries VALUES (2, 'pending', 1, '', NULL, NULL, 1.0)",
            "rollout b cannot be read (TypeError",
        ),
        (
            "INSERT INTO entries SELECT 2, 31, 60, payload, payload_crc32 FROM entries WHERE rollout = 2",
            "record 1 where 31 is expected",
        ),
    ],
)
async def test_a_damaged_rollout(written: Path, statement: str, text: str) -> None:
    execute(written, statement)
    found = await refused_load(written)
    assert found.startswith(f"{written}/{DATABASE} is damaged: ")
    assert text in found
    advice, _, uid = found.rpartition(" ")
    assert advice.endswith(f". Please restore it from a backup, or remove this rollout: rollout journal drop {written}")
    assert drop_rollouts(written, [uid, uid]) == [uid]
    assert [rollout.start.uid for rollout in await stored(written)] == ["a"]


async def test_what_cannot_be_dropped(written: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has no rollout z$"):
        drop_rollouts(written, ["a", "z"])
    (written / "worker-1").mkdir()
    with pytest.raises(RuntimeError, match=r"has no rollout z; further workers .* of their own: \S+/worker-1$"):
        drop_rollouts(written, ["z"])
    async with SqliteJournal(written) as journal:
        with pytest.raises(RuntimeError, match="is in use by another server"):
            drop_rollouts(written, ["a"])
        assert len(await journal.load()) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RuntimeError, match="has no journal"):
        drop_rollouts(empty, ["a"])
    assert not [*empty.iterdir()]


@pytest.mark.parametrize(
    ("table", "column", "text"),
    [
        ("rollouts", "start", "rollout b cannot be read (ValueError: start: "),
        ("entries", "payload", "rollout b cannot be read (ValueError: records 1 to 30: "),
        ("outcomes", "body", "rollout b cannot be read (ValueError: outcome: "),
    ],
)
async def test_one_changed_bit(written: Path, table: str, column: str, text: str) -> None:
    async with SqliteJournal(written) as journal:
        await journal.load()
        journal.write(
            DeliveryChanged("b", StoredDelivery(Delivery(DeliveryState.PENDING), "key of b", 1e10, b"outcome"))
        )
    assert len(await stored(written)) == 2
    number = "number" if table == "rollouts" else "rollout"
    [(whole,)] = query(written, f"SELECT {column} FROM {table} WHERE {number} = 2")
    for bit in random.Random(table).sample(range(8 * len(whole)), 4):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        execute(written, f"UPDATE {table} SET {column} = x'{changed.hex()}' WHERE {number} = 2")
        found = await refused_load(written)
        assert found.startswith(
            f"{written}/{DATABASE} is damaged: {text}the bytes on the disk do not match their checksum"
        )
        assert "restore it from a backup" in found


async def test_records_of_another_rollout(written: Path) -> None:
    execute(written, "DELETE FROM entries WHERE rollout = 2", "UPDATE entries SET rollout = 2")
    assert "rollout b cannot be read (ValueError: records 1 to 30: the bytes" in await refused_load(written)


async def test_a_changed_bit_of_a_group(directory: Path) -> None:
    group = FormedGroup("g", "group", "request", "rollout", 2, 1, True, ("a", "b"))
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(GroupFormed(group))
    execute(directory, "UPDATE groups SET payload = CAST(replace(payload, 'group', 'grouq') AS BLOB)")
    async with SqliteJournal(directory) as journal:
        with pytest.raises(JournalUnusable, match=r"group 1 cannot be read .*do not match their checksum"):
            await journal.load_groups()


async def test_a_text_that_is_not_utf8(written: Path) -> None:
    execute(written, "INSERT INTO deliveries VALUES (2, 'refused', 1, CAST(x'736b2dff' AS TEXT), NULL, NULL, 1.0)")
    async with SqliteJournal(written) as journal:
        with pytest.raises(JournalUnusable) as caught:
            await journal.load()
    assert str(caught.value).startswith(
        f"{written}/{DATABASE} is damaged (it has a value that cannot be read): restore it"
    )
    assert caught.value.__cause__ is None


async def test_a_log_that_lacks_its_middle(directory: Path) -> None:
    async with SqliteJournal(directory) as journal:
        await journal.load()
        journal.write(accepted("a"))
        for n in (1, 2, 3):
            journal.write(appended("a", n, n))
            await journal.flush()
    execute(directory, "DELETE FROM entries WHERE first_sequence = 2")
    assert "the log of rollout a has record 3 where 2 is expected" in await refused_load(directory)


async def test_keys(written: Path) -> None:
    key = written / "key"
    right = key.read_text().strip()
    assert len(await stored(written, right)) == 2
    wrong = await refused_load(written, Fernet.generate_key().decode())
    assert "were encrypted with another key: set ROLLOUT_JOURNAL_KEY" in wrong
    assert "ROLLOUT_JOURNAL_KEY is not a Fernet key" in await refused(written, "not-a-key")
    key.write_bytes(Fernet.generate_key())
    assert "were encrypted with another key" in await refused_load(written)
    key.write_text("short")
    found = await refused(written)
    assert f"the key file {key} cannot be used: it is not a Fernet key" in found
    key.unlink()
    found = await refused(written)
    assert f"the key file {key} is gone" in found
    assert "set ROLLOUT_JOURNAL_KEY" in found
    assert not key.exists()
    key.write_text(right)
    assert len(await stored(written)) == 2


@pytest.mark.parametrize("key", [None, Fernet.generate_key(), b"short"], ids=["lost", "another", "none"])
async def test_a_rollout_whose_key_is_lost_can_be_dropped(written: Path, key: bytes | None) -> None:
    """Then nothing is left that needs the key."""
    file = written / "key"
    file.unlink()
    if key is not None:
        file.write_bytes(key)
    for uid in "ab":
        found = await (refused(written) if key is None else refused_load(written, Fernet.generate_key().decode()))
        assert found.endswith(f"If the key is lost, remove this rollout: rollout journal drop {written} {uid}")
        assert drop_rollouts(written, [uid]) == [uid]
        assert (file.read_bytes() if file.exists() else None) == key
    assert await stored(written, Fernet.generate_key().decode()) == []


async def test_a_given_key_leaves_none_in_the_directory(directory: Path) -> None:
    async with SqliteJournal(directory, Fernet.generate_key().decode()) as journal:
        await journal.load()
    assert not (directory / "key").exists()


def add_notes(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE rollouts ADD COLUMN notes TEXT")
    connection.exec_driver_sql("UPDATE rollouts SET notes = 'from ' || uid")


def fail(connection: Connection) -> None:
    connection.exec_driver_sql("CREATE TABLE half (done INTEGER)")
    connection.exec_driver_sql("INSERT INTO missing VALUES (1)")


async def test_migrations_run_once_and_in_order(written: Path) -> None:
    def rename(connection: Connection) -> None:
        connection.exec_driver_sql("ALTER TABLE rollouts RENAME COLUMN notes TO remarks")

    for migrations in ((add_notes,), (add_notes, rename), (add_notes, rename)):
        async with SqliteJournal(written, migrations=[*MIGRATIONS, *migrations]) as journal:
            assert len(await journal.load()) == 2
    assert query(written, "PRAGMA user_version") == [(6,)]
    assert query(written, "SELECT remarks FROM rollouts") == [("from a",), ("from b",)]
    assert "knows versions up to 4" in await refused(written)


async def test_a_journal_of_version_3_is_migrated(written: Path) -> None:
    before = await stored(written)
    columns = query(written, "SELECT m.name, p.name FROM sqlite_master m JOIN pragma_table_info(m.name) p")
    execute(written, *TO_VERSION_3)
    async with SqliteJournal(written) as journal:
        assert await journal.load() == before
        journal.write(appended("a", 31, 31))
    assert query(written, "SELECT payload_crc32 IS NULL FROM entries WHERE rollout = 1") == [(1,), (0,)]
    assert len((await stored(written))[0].entries) == 31
    found = query(written, "SELECT m.name, p.name FROM sqlite_master m JOIN pragma_table_info(m.name) p")
    assert sorted(found) == sorted(columns)


async def test_a_journal_of_version_1_is_migrated(written: Path) -> None:
    before = await stored(written)
    execute(written, *TO_VERSION_1)
    async with SqliteJournal(written) as journal:
        assert await journal.load() == before
        assert await journal.load_groups() == []
        journal.write(CancelRequested("a", "enough"))
    assert [each.cancelled for each in await stored(written)] == ["enough", None]
    assert query(written, "PRAGMA user_version") == [(4,)]


async def test_prompts_that_version_2_stored_twice_are_read(written: Path) -> None:
    prompt = array("I", [1, 2, 3])
    message = Message.write({"role": "assistant", "content": "8"})
    record = Answered(1, message, "stop", array("I", [4]), None, Prediction(prompt[:1], prompt[1:]), prompt)
    entry = Entry(1, 1700000000.0, record)
    batch = pb.Entries.FromString(encode_entries([entry]))
    answered = batch.entries[0].answered
    assert answered.reported_as_predicted
    answered.reported_as_predicted = False
    answered.reported = encode_tokens(prompt)
    change = f"UPDATE entries SET first_sequence = 1, last_sequence = 1, payload = x'{batch.SerializeToString().hex()}'"
    execute(written, *TO_VERSION_3, f"{change} WHERE rollout = 2", "PRAGMA user_version = 2")
    assert list((await stored(written))[1].entries) == [entry]
    assert query(written, "PRAGMA user_version") == [(4,)]


async def test_a_migration_that_fails_changes_nothing(written: Path) -> None:
    with pytest.raises(JournalUnusable, match="no such table: missing"):
        await SqliteJournal(written, migrations=[*MIGRATIONS, add_notes, fail]).start()
    assert query(written, "PRAGMA user_version") == [(4,)]
    assert query(written, "SELECT name FROM sqlite_master WHERE name = 'half'") == []
    assert len(await stored(written)) == 2


async def test_files_of_a_start_that_was_interrupted_do_not_matter(directory: Path) -> None:
    os.mkdir(directory)
    for name in (f"{DATABASE}.new", f"{DATABASE}.new-journal", "key.new"):
        (directory / name).write_bytes(b"half")
    assert await stored(directory) == []
    assert set(os.listdir(directory)) == {DATABASE, "key", "lock"}
