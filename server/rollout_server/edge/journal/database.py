"""The SQLite database of the journal. All calls come from the journal's one thread."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from cryptography.fernet import Fernet
from sqlalchemy import Connection, NullPool, create_engine, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from rollout_server.edge.journal.batch import Batch
from rollout_server.edge.journal.files import (
    APPLICATION_ID,
    ELSEWHERE,
    RESTORE,
    JournalDirectory,
    given_key,
)
from rollout_server.edge.journal.schema import (
    META,
    MIGRATIONS,
    ROLLOUTS,
    Migration,
    create_tables,
    latest_version,
    migrate,
)
from rollout_server.edge.journal.stored import StoredReader
from rollout_server.runtime.journal import Change, JournalUnavailable, JournalUnusable, StoredGroup, StoredRollout

_log = logging.getLogger(__name__)

_BUSY_SECONDS: Final = 1.0
"""How long a commit waits for another program that has the database locked, such as a person's SQLite shell."""

_PRAGMAS: Final = (
    # A commit returns when its changes are on the disk; a power failure loses none of them.
    "synchronous = FULL",
    # 16 MB of changes between two checkpoints, of which each costs two fsyncs of the whole database; 8 MB in a database of a
    # server whose pages had 4 KB.
    "wal_autocheckpoint = 2000",
    # A large transaction does not leave its log that large for good.
    "journal_size_limit = 67108864",
)

_PAGE_BYTES: Final = 8192
"""Page size of a new database. With 4 KB, storing and deleting a prompt of 32,000 tokens takes a quarter more CPU."""

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY: Final = 0xFF
"""Part of SQLite's error codes that names the kind of the error."""

_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_READONLY: "make the file, its directory and its file system writable for the server's user",
    sqlite3.SQLITE_PERM: "let the server's user read and write it",
    sqlite3.SQLITE_CANTOPEN: "let the server's user read and write it and its directory, and check its limit of open files",
    sqlite3.SQLITE_BUSY: "close the other program that has it open",
    sqlite3.SQLITE_LOCKED: "close the other program that has it open",
    sqlite3.SQLITE_IOERR: "check its disk and the space on it, and the server's limit of file sizes (ulimit -f)",
    sqlite3.SQLITE_CORRUPT: f"stop the server, and {RESTORE}",
    sqlite3.SQLITE_NOTADB: f"stop the server, and {RESTORE}",
}


class Database:
    """The journal's database, in a directory that it locks.

    Args:
        files: the directory.
        key: the Fernet key of the credentials; None: the one in the directory.
        migrations: how tables of older versions become those of the newest one.
    """

    def __init__(self, files: JournalDirectory, key: str | None, migrations: Sequence[Migration] = MIGRATIONS) -> None:
        self._files = files
        self._given_key = key
        self._migrations = migrations
        self._open: _OpenDatabase | None = None
        self._is_logged = False

    def open(self) -> str:
        """Lock the directory, open or create the database, and return the server's id. Raises `JournalUnusable`."""
        self._files.open()
        connection: Connection | None = None
        try:
            with _unusable(self._files.database):
                if not self._files.has_database:
                    self._create()
                self._files.check_header()
                connection = _connect(self._files.database)
                self._check(connection)
                key = self._key(connection)
                server_id = self._prepare(connection)
                driver = cast(sqlite3.Connection, connection.connection.driver_connection)
                self._open = _OpenDatabase(connection, driver, key, self._files.identity())
        except BaseException:
            if connection is not None:
                connection.close()
            self._files.close()
            raise
        return server_id

    def load(self) -> Sequence[tuple[int, StoredRollout]]:
        """Return all rollouts with their numbers, in the order of acceptance. Raises `JournalUnusable`."""
        opened = self._opened()
        reader = StoredReader(self._files.database, opened.key)
        with _unusable(self._files.database), opened.connection.begin():
            return [*reader.rollouts(opened.connection)]

    def load_groups(self) -> Sequence[tuple[int, StoredGroup]]:
        """Return all groups with their numbers, in the order in which they were formed. Raises `JournalUnusable`."""
        opened = self._opened()
        reader = StoredReader(self._files.database, opened.key)
        with _unusable(self._files.database), opened.connection.begin():
            return [*reader.groups(opened.connection)]

    def numbers(self, uids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the rollouts with these uids, without those that do not exist. Raises `JournalUnusable`."""
        opened = self._opened()
        with _unusable(self._files.database), opened.connection.begin():
            rows = opened.connection.execute(select(ROLLOUTS.c.uid, ROLLOUTS.c.number).where(ROLLOUTS.c.uid.in_(uids)))
            return {row.uid: row.number for row in rows}

    def commit(self, changes: Sequence[tuple[int, Change]]) -> set[int]:
        """Commit changes, all or none of them. Raises `JournalUnavailable`.

        Returns the numbers of rollouts that cannot be encoded. The journal does not have them any more.
        """
        opened = self._opened()
        batch = Batch(changes, opened.key)
        self._check_identity(opened)
        try:
            with opened.driver:  # one transaction, which is rolled back if anything fails
                batch.write(opened.driver)
        except sqlite3.Error as error:
            raise JournalUnavailable(self._failure(error)) from error
        return batch.unencodable

    def close(self) -> None:
        """Move what is in SQLite's log into the database, close it, and release the lock."""
        opened, self._open = self._open, None
        if opened is None:
            return
        with suppress(SQLAlchemyError):
            opened.connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        with suppress(SQLAlchemyError):
            opened.connection.close()
        self._files.close()

    def _opened(self) -> _OpenDatabase:
        if self._open is None:
            raise RuntimeError("the journal is not open")
        return self._open

    def _create(self) -> None:
        """Create the database under another name, so that a database with the right name is always complete."""
        new = self._files.begin_database()
        connection = _connect(new)
        try:
            connection.exec_driver_sql(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.rollback()
            with connection.begin():
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                create_tables(connection)
                connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
                _set_version(connection, latest_version(self._migrations))
        finally:
            connection.close()
        self._files.finish_database(new)

    def _check(self, connection: Connection) -> None:
        """Raise `JournalUnusable` for tables of a newer server and for damage."""
        with connection.begin():
            version, newest = _version(connection), latest_version(self._migrations)
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        if version > newest:
            text = (
                f"{self._files.database} was written by a newer server: it has version {version}, and this server knows versions "
                f"up to {newest}. Run the newer server, {ELSEWHERE}"
            )
            raise JournalUnusable(text)
        if version < 1 or found != "ok":
            cause = "its tables have no version" if version < 1 else found
            raise JournalUnusable(f"{self._files.database} is damaged ({cause}): {RESTORE}")

    def _prepare(self, connection: Connection) -> str:
        """Configure the connection, migrate the tables, and return the server's id."""
        mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar_one()
        if mode != "wal":
            text = (
                f"{self._files.database} cannot use a write-ahead log there (its journal mode stays {mode}): use a directory on a "
                "local disk"
            )
            raise JournalUnusable(text)
        for pragma in _PRAGMAS:
            connection.exec_driver_sql(f"PRAGMA {pragma}")
        connection.rollback()
        with connection.begin():
            # Migrations change tables, before which the driver would begin no transaction by itself.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            migrate(connection, _version(connection), self._migrations)
            # Writing it each time shows at once whether the database can be written, and creates the files beside it.
            _set_version(connection, latest_version(self._migrations))
            server_id = connection.scalar(select(META.c.value).where(META.c.name == "server_id"))
            if server_id is None:
                raise JournalUnusable(f"{self._files.database} is damaged (it has no server id): {RESTORE}")
        return str(server_id)

    def _key(self, connection: Connection) -> Fernet:
        if self._given_key is not None:
            return given_key(self._given_key)
        with connection.begin():
            encrypted = select(ROLLOUTS.c.uid).where(ROLLOUTS.c.credentials.is_not(None)).order_by(ROLLOUTS.c.number)
            needed_by = connection.scalar(encrypted.limit(1))
        return self._files.key(needed_by)

    def _check_identity(self, opened: _OpenDatabase) -> None:
        try:
            replaced = self._files.identity() != opened.identity
            cause = "was replaced by another file"
        except OSError as error:
            replaced, cause = True, f"is gone ({error.strerror})"
        if replaced:
            text = (
                f"the journal {self._files.database}, or a file of SQLite beside it, {cause} while the server runs: put the same "
                "file back (a copy is not enough), or restart the server, which then starts with what is there"
            )
            raise JournalUnavailable(text)

    def _failure(self, error: sqlite3.Error) -> str:
        advice = _ADVICE.get(_primary_code(error) or 0)
        if advice is None:
            advice = "see the server's log"
            if not self._is_logged:  # once: the commit is tried again every few seconds
                self._is_logged = True
                _log.error("the journal %s cannot be written", self._files.database, exc_info=error)
        return f"the journal {self._files.database} cannot be written ({_cause(error)}): {advice}"


@dataclass(frozen=True, slots=True)
class _OpenDatabase:
    """An open database: its connection, the key of its credentials, and what identifies its files.

    `driver` is what `connection` wraps. Commits use it, because SQLAlchemy would double the cost of a small one.
    """

    connection: Connection
    driver: sqlite3.Connection
    key: Fernet
    identity: tuple[tuple[int, int], ...]


def _connect(path: Path) -> Connection:
    """Open a database that exists. Without `mode=rw` SQLite would create one."""

    def connect() -> sqlite3.Connection:
        # The driver begins a transaction before the first statement that changes rows.
        return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_BUSY_SECONDS, isolation_level="IMMEDIATE")

    # Errors must not show parameters, which are what callers and models sent.
    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)
    return engine.connect()


def _version(connection: Connection) -> int:
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def _set_version(connection: Connection, version: int) -> None:
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


@contextmanager
def _unusable(path: Path) -> Iterator[None]:
    """Raise errors of the database and of the file system as `JournalUnusable`."""
    try:
        yield
    except SQLAlchemyError as error:
        code = _primary_code(error)
        if code is None:  # the driver cannot read a text that is not UTF-8, and shows it in its error
            raise JournalUnusable(f"{path} is damaged (it has a value that cannot be read): {RESTORE}") from None
        if code in _DAMAGED:
            raise JournalUnusable(f"{path} is damaged ({_cause(error)}): {RESTORE}") from error
        advice = _ADVICE.get(code, f"make it usable for the server's user, {ELSEWHERE}")
        raise JournalUnusable(f"the journal {path} cannot be used ({_cause(error)}): {advice}") from error
    except OSError as error:
        text = f"the journal {path} cannot be used ({error})"
        raise JournalUnusable(f"{text}: make it usable for the server's user, {ELSEWHERE}") from error


def _primary_code(error: Exception) -> int | None:
    code = getattr(_original(error), "sqlite_errorcode", None)
    return None if code is None else code & _PRIMARY


def _cause(error: Exception) -> str:
    """Return SQLite's own text, without the statement, which SQLAlchemy adds."""
    return str(_original(error))


def _original(error: Exception) -> BaseException:
    return error.orig or error if isinstance(error, DBAPIError) else error
