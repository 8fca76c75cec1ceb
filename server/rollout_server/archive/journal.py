"""The rollouts in the journal of a stopped server, read without changing anything in its directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from osmosis.rollout.v1 import event_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from sqlalchemy import Connection, Engine, NullPool, create_engine, select
from sqlalchemy.exc import SQLAlchemyError

from rollout_server.archive.archive import Recording, Unreadable
from rollout_server.core.machine import Machine, replay
from rollout_server.core.outcome import Outcome
from rollout_server.core.spec import Spec
from rollout_server.edge.journal.files import APPLICATION_ID, DATABASE
from rollout_server.edge.journal.schema import ROLLOUTS, latest_version, migrate
from rollout_server.edge.journal.stored import StoredReader
from rollout_server.edge.wire.event import event
from rollout_server.edge.wire.rollout import rollout_to_proto
from rollout_server.runtime.journal import JournalUnusable, StoredRollout
from rollout_server.runtime.log import Log
from rollout_server.runtime.outcome_delivery import Delivery
from rollout_server.runtime.rollout import RolloutState

_WAL: Final = "-wal"
_LOCK: Final = "lock"
_AHEAD: Final = 16
"""Number of rollouts that are read at once for a list. Large ones have megabytes."""


class SavedJournal:
    """The journal of a stopped server, between `open` and `close`.

    A journal whose server was stopped is read where it is. If its server was killed, SQLite's log holds changes that are not in the
    database yet, and reading them would write beside it; so it is copied to a temporary directory. So is one with older tables.

    Args:
        directory: that of the journal.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._named = directory / DATABASE  # in messages, also of a copy
        self._database = self._named
        self._copies: TemporaryDirectory[str] | None = None
        # One engine for all reads, because it keeps the compiled statements.
        self._engine = _engine(lambda: self._database, "mode=ro&immutable=1")
        self._state: tuple[tuple[int, ...], ...] = ()
        self._next: dict[int, StoredRollout] = {}

    def open(self) -> list[JournalRollout]:
        """Return the rollouts, oldest first. Raises `Unreadable`, also for a journal that a server has open."""
        _check_unused(self._directory)
        self._state = self._fingerprint()
        if self._state[1][2:3] > (0,) or self._version() < latest_version():
            self._copy()
        try:
            with self.connection() as connection:
                return [JournalRollout(self, row.number, row.uid) for row in connection.execute(_NAMES)]
        except Unreadable:
            self.close()
            raise

    def close(self) -> None:
        """Delete the copy, if there is one."""
        if self._copies is not None:
            self._copies.cleanup()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield a connection that cannot write. Raises `Unreadable`."""
        self._check_unchanged()
        try:
            with self._engine.connect() as connection:
                yield connection
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self._check_unchanged()
            raise Unreadable(f"{self._named} cannot be read ({getattr(error, 'orig', None) or error})") from error
        self._check_unchanged()

    def read(self, number: int) -> StoredRollout:
        """Return a rollout by its number, without its credentials. Raises `Unreadable`."""
        try:
            found = self._stored(number, number).get(number)
        except JournalUnusable as error:
            raise Unreadable(str(error)) from error
        if found is None:
            raise Unreadable(f"{self._named} has no rollout {number} any more")
        return found

    def read_next(self, number: int) -> StoredRollout:
        """Return a rollout like `read`, for callers that read one after the other, the newest first: several are read at once.

        Not for several threads at the same time.
        """
        if number not in self._next:
            try:
                self._next = self._stored(number - _AHEAD + 1, number)
            except JournalUnusable:  # one of them is damaged
                self._next = {}
        return self._next.pop(number, None) or self.read(number)

    def _stored(self, first: int, last: int) -> dict[int, StoredRollout]:
        with self.connection() as connection:
            return dict(StoredReader(self._named, None).rollouts(connection, (first, last)))

    def _version(self) -> int:
        """Return the version of the tables. Raises `Unreadable` unless it is a journal of this server or an older one."""
        with self.connection() as connection:
            pragmas = ("application_id", "user_version")
            kind, version = (int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in pragmas)
        if kind != APPLICATION_ID or version < 1:
            raise Unreadable(f"{self._named} is an SQLite database, but not a journal of this server")
        if version > latest_version():
            text = f"it has version {version}, and this program knows versions up to {latest_version()}"
            raise Unreadable(f"{self._named} was written by a newer server: {text}. Use `rollout view` of that server")
        return version

    def _copy(self) -> None:
        """Continue with a copy, which has all changes and the newest tables.

        No lock is held meanwhile, because a server that starts would end. Raises `Unreadable` if one has changed the journal.
        """
        self._copies = TemporaryDirectory(prefix="rollout-view-")
        copy = Path(self._copies.name) / DATABASE
        try:
            for ending in ("", _WAL):
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{self._database}{ending}", f"{copy}{ending}")
            _check_unused(self._directory)
            self._check_unchanged()
            self._database, self._state = copy, ()
            self._version()
            with _engine(lambda: copy, "mode=rw").connect() as connection, connection.begin():
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
                migrate(connection, version)
            self._state = self._fingerprint()
        except (OSError, SQLAlchemyError) as error:
            self.close()
            raise Unreadable(f"the journal {self._directory} cannot be copied to {copy.parent} ({error})") from error
        except Unreadable:
            self.close()
            raise

    def _fingerprint(self) -> tuple[tuple[int, ...], ...]:
        try:
            return tuple(_stat(f"{self._database}{ending}") for ending in ("", _WAL))
        except OSError as error:
            raise Unreadable(f"the journal {self._named} cannot be read: {error.strerror}") from error

    def _check_unchanged(self) -> None:
        """Raise `Unreadable` if a server has opened the journal since `open`, so what was read may not be consistent."""
        if self._state and self._state != self._fingerprint():
            raise Unreadable(f"the journal {self._directory} was changed meanwhile: {_IN_USE}")


@dataclass(frozen=True, slots=True)
class JournalRollout:
    """A rollout of a journal."""

    journal: SavedJournal
    number: int
    uid: str

    def read(self) -> Recording:
        """Read the rollout and rebuild its events and its outcome from its log. Raises `Unreadable`."""
        stored = self.journal.read(self.number)
        rebuilt = _rebuilt(stored)
        events = [event(rebuilt, entry, event_pb2.EVENT_DETAIL_FULL) for entry in stored.entries]
        return Recording(rollout_to_proto(rebuilt, pb.ROLLOUT_VIEW_FULL), events)

    def summary(self) -> pb.Rollout:
        """Read the rollout in the view "basic". Raises `Unreadable`."""
        return rollout_to_proto(_rebuilt(self.journal.read_next(self.number)), pb.ROLLOUT_VIEW_BASIC)


@dataclass(frozen=True, slots=True)
class _RebuiltRollout:
    """A rollout as its journal has it. One without an end was queued or running when its server stopped."""

    uid: str
    caller: str
    spec: Spec
    machine: Machine
    log: Log
    created: float
    finished: float | None
    delivery: Delivery | None

    @property
    def outcome(self) -> Outcome | None:
        return self.machine.outcome

    @property
    def state(self) -> RolloutState:
        if self.machine.outcome is not None:
            return RolloutState.FINISHED
        return RolloutState.RUNNING if self.log.last_sequence > 1 else RolloutState.QUEUED


def _rebuilt(stored: StoredRollout) -> _RebuiltRollout:
    """Return the rollout that a log describes. Raises `Unreadable`."""
    start = stored.start
    spec, entries = start.request.spec, stored.entries
    machine = Machine(start.uid, spec.messages, spec.limits, spec.staleness)
    try:
        replay(machine, (entry.record for entry in entries))
    except Exception as error:  # whatever records that no server has written make the machine raise
        text = f"rollout {start.uid} cannot be rebuilt: its records contradict each other ({type(error).__name__})"
        raise Unreadable(text) from None
    finished = entries[-1].time if machine.outcome is not None else None
    delivery = stored.stored_delivery.delivery if stored.stored_delivery is not None else None
    return _RebuiltRollout(
        start.uid, start.request.caller, spec, machine, Log(entries), start.created, finished, delivery
    )


_NAMES: Final = select(ROLLOUTS.c.number, ROLLOUTS.c.uid).order_by(ROLLOUTS.c.number)
_IN_USE: Final = "a server uses it; `rollout view URL` with the URL of that server's HTTP port shows its rollouts"


def is_journal(directory: Path) -> bool:
    """Return whether a directory is that of a journal."""
    return (directory / DATABASE).is_file()


def _check_unused(directory: Path) -> None:
    """Raise `Unreadable` if a server has the journal open."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDONLY)
    except FileNotFoundError:  # a copy of the database alone
        return
    except OSError as error:
        raise Unreadable(f"the journal {directory} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Unreadable(f"the journal {directory} is in use: {_IN_USE}") from None
    finally:
        os.close(lock)


def _engine(database: Callable[[], Path], parameters: str) -> Engine:
    """Return an engine whose connections are each to the database that exists by then. It keeps no connection open."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{database().absolute().as_uri()}?{parameters}", uri=True, isolation_level=None)

    return create_engine("sqlite+pysqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def _stat(path: str) -> tuple[int, ...]:
    """Return what changes when a file does: device, inode, size and time; nothing if there is no such file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
