"""The journal's directory: permissions, the lock of its one server, and the key of the credentials.

Nothing that is already in the directory is ever overwritten or repaired: a journal that cannot be used is left to its operator.
"""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.fernet import Fernet
from filelock import FileLock, Timeout

from rollout_server.runtime.journal import JournalUnusable

DATABASE: Final = "journal.sqlite3"
_LOCK: Final = "lock"
_KEY: Final = "key"
_NEW: Final = ".new"
"""Ending of a file that is being created. It gets its name when it is complete, so a crash leaves no half file."""

APPLICATION_ID: Final = 0x4F534A31
"""Number in the header of the database that marks it as a journal: "OSJ1"."""

_HEADER: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_APPLICATION_ID_AT: Final = 68

ELSEWHERE: Final = "or use another directory for the journal"


class JournalDirectory:
    """The files of a journal, under a lock that one process has at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.database = self.path / DATABASE
        self._open_files = tuple(f"{self.database}{ending}" for ending in ("", "-wal", "-shm"))
        # Not bound to a thread: the process may end in another one than the journal's.
        self._lock = FileLock(self.path / _LOCK, timeout=0, mode=0o600, thread_local=False)

    def open(self) -> None:
        """Create the directory if there is none, and take the lock. Raises `JournalUnusable`."""
        try:
            if not self.path.exists():
                self.path.mkdir(mode=0o700, parents=True)
                _sync_directory(self.path.parent)
            self._check_mode()
            self._lock.acquire()
        except Timeout:
            text = (
                f"the journal {self.path} is in use by another server (it holds the file {_LOCK}), for example by one that "
                f"already runs on this port: stop that server, {ELSEWHERE}"
            )
            raise JournalUnusable(text) from None
        except OSError as error:
            text = (
                f"the journal's directory {self.path} cannot be used: {error.strerror or error}. Make it a directory that the "
                f"server's user may write, {ELSEWHERE}"
            )
            raise JournalUnusable(text) from error

    def _check_mode(self) -> None:
        """Raise `JournalUnusable` if everybody may write to the directory. Its group may: volumes of Kubernetes allow it."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & stat.S_IWOTH:
            text = (
                f"the journal's directory {self.path} has mode {mode:04o}, so every user of the machine may replace what is in it: "
                f"chmod 0700 it, {ELSEWHERE}"
            )
            raise JournalUnusable(text)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def has_database(self) -> bool:
        """Whether there is a database. Raises `JournalUnusable` if only its log is left, which belongs to a lost database."""
        if self.database.exists():
            return True
        for ending in ("-wal", "-journal"):
            rest = self.database.with_name(DATABASE + ending)
            if rest.exists() and rest.stat().st_size:
                text = (
                    f"{rest} has changes of a database that is gone: put {self.database} back, or delete {rest.name} as well to "
                    "start without the rollouts"
                )
                raise JournalUnusable(text)
        return False

    def check_header(self) -> None:
        """Raise `JournalUnusable` if the database is not a journal. SQLite itself would change some files that it opens."""
        try:
            with self.database.open("r+b") as file:
                header = file.read(_HEADER_BYTES)
        except OSError as error:
            text = (
                f"the journal {self.database} cannot be written: {error.strerror or error}. Let the server's user read and write "
                f"it, {ELSEWHERE}"
            )
            raise JournalUnusable(text) from error
        if len(header) < _HEADER_BYTES or not header.startswith(_HEADER):
            raise JournalUnusable(f"{self.database} is not an SQLite database, or its beginning is damaged: {RESTORE}")
        if int.from_bytes(header[_APPLICATION_ID_AT : _APPLICATION_ID_AT + 4], "big") != APPLICATION_ID:
            text = f"{self.database} is an SQLite database, but not a journal of this server: move it away, {ELSEWHERE}"
            raise JournalUnusable(text)

    def begin_database(self) -> Path:
        """Return an empty file for a new database, which gets its name by `finish_database`."""
        new = self.database.with_name(DATABASE + _NEW)
        for ending in ("", "-journal", "-wal", "-shm"):
            new.with_name(new.name + ending).unlink(missing_ok=True)
        # SQLite gives its further files the permissions of this one.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return new

    def finish_database(self, new: Path) -> None:
        """Give a new database its name. The caller has closed it."""
        _rename(new, self.database)

    def identity(self) -> tuple[tuple[int, int], ...]:
        """Return what identifies the files that SQLite has open. Raises `OSError` if one is missing.

        SQLite would go on writing to files that were deleted, and everything written there would be lost.
        """
        return tuple((found.st_dev, found.st_ino) for found in map(os.stat, self._open_files))

    def key(self, needed_by: str | None) -> Fernet:
        """Return the key from the directory, and create it if there is none yet. Raises `JournalUnusable`.

        `needed_by`: the uid of a rollout whose credentials are encrypted with it; None: there is none.
        """
        path = self.path / _KEY
        if not path.exists():
            if needed_by is not None:
                text = (
                    f"the key file {path} is gone, and {self.database} has credentials that are encrypted with it: put it "
                    "back, or set ROLLOUT_JOURNAL_KEY to the key. If the key is lost, "
                    f"{remove_advice(self.path, needed_by)}"
                )
                raise JournalUnusable(text)
            self._create_key(path)
        try:
            return Fernet(path.read_bytes().strip())
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not a Fernet key"
            raise JournalUnusable(
                f"the key file {path} cannot be used: {cause}. Restore it, or set ROLLOUT_JOURNAL_KEY to the key"
            ) from error

    def _create_key(self, path: Path) -> None:
        new = path.with_name(path.name + _NEW)
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(Fernet.generate_key() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _rename(new, path)


def remove_advice(directory: Path, uid: str) -> str:
    """Return what to do about a rollout that cannot be read."""
    return f"remove this rollout: {shlex.join(['rollout', 'journal', 'drop', str(directory), uid])}"


RESTORE: Final = f"restore it from a backup, or move the directory away to start without its rollouts, {ELSEWHERE}"


def given_key(key: str) -> Fernet:
    """Return the key of ROLLOUT_JOURNAL_KEY. Raises `JournalUnusable`, without the key in its text."""
    try:
        return Fernet(key)
    except ValueError:
        text = (
            "ROLLOUT_JOURNAL_KEY is not a Fernet key, which has 32 bytes in URL-safe base64: create one with `python -c 'from "
            "cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'`"
        )
        raise JournalUnusable(text) from None


def _rename(new: Path, path: Path) -> None:
    new.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make the names of new files survive a power failure. Not every platform can open a directory for this."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
